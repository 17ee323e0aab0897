"""A sweep of the words that people choose, at the command line or in a form.

No word of it names a file: a form of the dashboard is filled in by people who may read none of the
server's. The command line reads `@FILE` before (`flexq_bench.cli.size_files`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from flexq_bench.errors import UsageError
from flexq_bench.runs.sweep import CACHES, STAGES, Sweep, check_cases, known_words
from workloads.models import get_model
from workloads.patterns import is_glob
from workloads.ranges import parse_ranges
from workloads.suite import MAX_CASES, Shape, layer_shapes

_ALL_KERNELS = ("*",)
_SIZES = (1, 2, 4, 8, 16)


def parse_sweep(
    *,
    kernels: str | None,
    m: Sequence[int] | None = None,
    n: Sequence[int] | None = None,
    k: Sequence[int] | None = None,
    model: str | None = None,
    layers: str = "fused",
    stage: str = "gemm",
    cache: str = "cold",
    shapes: tuple[Shape, ...] = (),
    most_cases: int = MAX_CASES,
) -> Sweep:
    """The sweep that these words ask for. kernels: labels or globs, None: all.

    m, n, k: sizes, each once; m None: a few. model: its layers in place of n and k. layers:
    `fused`, `separate`, or names. shapes: in place of model, n and k.
    Raises UsageError or WorkloadError, which say what is wrong and
    what there is; for more than most_cases before any shape of them is made.
    """
    labels = split_names(kernels) or _ALL_KERNELS
    sizes = tuple(m or _SIZES)
    stages = known_words("stage", split_names(stage) or (), STAGES)
    caches = known_words("cache", split_names(cache) or (), CACHES)
    # A glob may find many kernels; how many, only the plan of a device knows.
    named = len({label for label in labels if not is_glob(label)}) or 1
    of_a_shape = named * len(sizes) * len(stages) * len(caches)
    if shapes:
        if model is not None or n is not None or k is not None:
            raise UsageError("--config brings its own N and K: leave out --model, --n and --k")
    elif model is not None:
        if n is not None or k is not None:
            raise UsageError("--model brings its own N and K: leave out --n and --k")
        shapes = _model_shapes(model, layers)
    elif n is None or k is None:
        raise UsageError("which layers? Give --n and --k, --model (see list models), or --config")
    else:
        check_cases(len(n) * len(k) * of_a_shape, most_cases, "a sweep")
        shapes = tuple(Shape(a, b, layer="") for a, b in product(n, k))
    check_cases(len({(s.n, s.k) for s in shapes}) * of_a_shape, most_cases, "a sweep")
    return Sweep(labels, sizes, shapes, stages, caches)


def _model_shapes(model: str, layers: str) -> tuple[Shape, ...]:
    names = split_names(layers) or ("fused",)
    return layer_shapes([get_model(model)], names[0] if len(names) == 1 else names)


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
