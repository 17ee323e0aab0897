"""Parsing of a sweep from texts, for the command line and for a form of the dashboard.

No text is used as a file name, as users of the dashboard must not read the server's files. The
command line expands `@FILE` before (`flexq_bench.cli.sweep`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from flexq_bench.errors import UsageError
from flexq_bench.sweeps.sweep import CACHES, STAGES, Sweep, check_cases, select_words
from flexq_bench.workloads.models import get_model
from flexq_bench.workloads.operation import operation
from flexq_bench.workloads.patterns import is_glob
from flexq_bench.workloads.ranges import check_sizes, parse_ranges
from flexq_bench.workloads.suite import (
    MAX_CASES,
    Shape,
    combinations,
    layer_shapes,
    parameter_values,
)

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
    """Parse a sweep. kernels: comma-separated labels or globs; None: all.

    m, n, k: distinct sizes; m None: 1, 2, 4, 8, 16. model: its layers replace n and k. layers:
    `fused`, `separate`, or names. shapes: replace model, n and k.
    Raises UsageError or WorkloadError with the valid values; for more than most_cases cases before
    any shape is created.
    """
    labels = split_names(kernels) or _ALL_KERNELS
    sizes = tuple(m or _SIZES)
    stages = select_words("stage", split_names(stage) or (), STAGES)
    caches = select_words("cache", split_names(cache) or (), CACHES)
    # A glob may match many kernels; the number is known only when a device's plan is built.
    named = len({label for label in labels if not is_glob(label)}) or 1
    cases_per_shape = named * len(sizes) * len(stages) * len(caches)
    if shapes:
        if model is not None or n is not None or k is not None:
            raise UsageError("--config brings its own N and K: leave out --model, --n and --k")
    elif model is not None:
        if n is not None or k is not None:
            raise UsageError("--model brings its own N and K: leave out --n and --k")
        shapes = _model_shapes(model, layers)
    elif n is None or k is None:
        raise UsageError(
            "which layers? Give --n and --k, --model (see list models), or --config; of kernels of "
            "other operations --operation with --parameter"
        )
    else:
        check_cases(len(n) * len(k) * cases_per_shape, most_cases, "a sweep")
        shapes = tuple(Shape(a, b, layer="") for a, b in product(n, k))
    check_cases(len({(s.n, s.k) for s in shapes}) * cases_per_shape, most_cases, "a sweep")
    return Sweep(labels, sizes, shapes, stages, caches)


def _model_shapes(model: str, layers: str) -> tuple[Shape, ...]:
    names = split_names(layers) or ("fused",)
    return layer_shapes([get_model(model)], names[0] if len(names) == 1 else names)


def split_names(text: str | None) -> tuple[str, ...] | None:
    """Split a comma-separated list, except at commas within the brackets of a variant.

    Raises UsageError for a text without names, which must not mean all of them.
    """
    if text is None:
        return None
    parts = (part.strip() for part in re.split(r",(?![^\[\]]*\])", text))
    names = tuple(part for part in parts if part)
    if not names:
        raise UsageError(f"{text!r} names nothing: name one or more, or leave the option out")
    return names


def parameter_limits(texts: Sequence[str] | None) -> dict[str, str] | None:
    """Parse texts such as `context=1024:8192:x2` or `layout=paged`, one per parameter.

    None: not given. Raises UsageError for a text of another form or a repeated name, WorkloadError
    for invalid sizes.
    """
    if not texts:
        return None
    limits: dict[str, str] = {}
    for text in texts:
        name, _, values = (part.strip() for part in text.partition("="))
        if not name or not values or name in limits:
            raise UsageError(f"{text!r:.60} is no parameter: write name=values, each name once")
        if "=" in values:
            raise UsageError(f"{text!r:.60} has several parameters: give each its own --parameter")
        if values[0].isdigit():
            check_sizes(values)
        limits[name] = values
    return limits


def operation_sweep(
    name: str,
    parameters: Sequence[str] | None,
    *,
    kernels: Sequence[str] | None,
    cache: str,
) -> Sweep:
    """Parse a sweep of an operation other than linear: every kernel at all combinations.

    kernels: labels or globs; None: all. parameters: as of `parameter_limits`; those with a default
    may be left out. Raises UsageError or WorkloadError.
    """
    definition = operation(name)
    if name == "linear":
        raise UsageError("linear layers have --m, --n and --k, or --model: leave out --operation")
    limits = parameter_limits(parameters) or {}
    values = {given: parameter_values(text) for given, text in limits.items()}
    workloads = combinations(definition, values)
    caches = select_words("cache", split_names(cache) or (), CACHES)
    return Sweep(tuple(kernels or _ALL_KERNELS), (), (), (), caches, tuple(workloads))


def split_sizes(text: str | None) -> tuple[int, ...] | None:
    """Parse sizes by workloads.ranges. None: not given. Raises WorkloadError."""
    return None if text is None else parse_ranges(text)
