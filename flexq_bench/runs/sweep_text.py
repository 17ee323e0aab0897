"""A sweep as people type it, at the command line or in a form."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from flexq_bench.errors import UsageError
from flexq_bench.runs.sweep import CACHES, STAGES, Sweep, known_words
from workloads.models import get_model
from workloads.ranges import parse_ranges
from workloads.suite import Shape, layer_shapes

_ALL_KERNELS = ("*",)
_SIZES = (1, 2, 4, 8, 16)


def parse_sweep(
    *,
    kernels: str | None,
    m: str | None = None,
    n: str | None = None,
    k: str | None = None,
    model: str | None = None,
    layers: str = "fused",
    stage: str = "gemm",
    cache: str = "cold",
) -> Sweep:
    """The sweep that these texts ask for. kernels: labels or globs, None: all.

    m, n, k: ranges, or @FILE with such; m None: a few. model: its layers in place of n and k.
    layers: `fused`, `separate`, or names.
    Raises UsageError or WorkloadError, which say what is wrong and what there is.
    """
    return Sweep(
        split_names(kernels) or _ALL_KERNELS,
        sizes_of("--m", m) or _SIZES,
        _shapes(n, k, model, layers),
        known_words("stage", split_names(stage) or (), STAGES),
        known_words("cache", split_names(cache) or (), CACHES),
    )


def sizes_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """The sizes of a range, or of `@FILE`, separated by commas or white space. None: not given.

    Raises UsageError if the file can't be read, WorkloadError for what is no range.
    """
    if text is not None and text.startswith("@"):
        try:
            content = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{option} {text}: the file can't be read: {error}") from error
        text = ",".join(content.replace(",", " ").split())
    return split_sizes(text)


def split_names(text: str | None) -> tuple[str, ...] | None:
    """A comma-separated list; a comma inside a variant's brackets separates nothing.

    Raises UsageError for a text without names, which else would mean all of them.
    """
    if text is None:
        return None
    parts = (part.strip() for part in re.split(r",(?![^\[\]]*\])", text))
    names = tuple(part for part in parts if part)
    if not names:
        raise UsageError(f"{text!r} names nothing: name one or more, or leave the option out")
    return names


def split_sizes(text: str | None) -> tuple[int, ...] | None:
    """Sizes as workloads.ranges reads them. Raises WorkloadError."""
    return None if text is None else parse_ranges(text)


def _shapes(n: str | None, k: str | None, model: str | None, layers: str) -> tuple[Shape, ...]:
    if model is not None:
        if n is not None or k is not None:
            raise UsageError("--model brings its own N and K: leave out --n and --k")
        names = split_names(layers) or ("fused",)
        return layer_shapes([get_model(model)], names[0] if len(names) == 1 else names)
    ns, ks = sizes_of("--n", n), sizes_of("--k", k)
    if ns is None or ks is None:
        raise UsageError("which layers? Give --n and --k, or --model (see list models)")
    return tuple(Shape(a, b, layer="") for a, b in product(ns, ks))
