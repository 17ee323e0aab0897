"""A sweep as people type it, at the command line or in a form."""

from __future__ import annotations

from itertools import product

from flexq_bench.commands.options import split_names, split_sizes
from flexq_bench.errors import UsageError
from flexq_bench.sweeps import CACHES, STAGES, Sweep, known_words
from workloads.models import get_model
from workloads.ranges import parse_ranges
from workloads.suite import Shape, layer_shapes

_ALL_KERNELS = ("*",)


def parse_sweep(
    *,
    kernels: str | None,
    m: str,
    n: str | None = None,
    k: str | None = None,
    model: str | None = None,
    layers: str = "fused",
    stage: str = "gemm",
    cache: str = "cold",
) -> Sweep:
    """The sweep that these texts ask for. kernels: labels or globs, None: all.

    m, n, k: ranges. model: its layers in place of n and k; layers: `fused`, `separate`, or names.
    Raises UsageError or WorkloadError, which say what is wrong and what there is.
    """
    return Sweep(
        split_names(kernels) or _ALL_KERNELS,
        parse_ranges(m),
        _shapes(n, k, model, layers),
        known_words("stage", split_names(stage) or (), STAGES),
        known_words("cache", split_names(cache) or (), CACHES),
    )


def _shapes(n: str | None, k: str | None, model: str | None, layers: str) -> tuple[Shape, ...]:
    if model is not None:
        if n is not None or k is not None:
            raise UsageError("--model brings its own N and K: leave out --n and --k")
        names = split_names(layers) or ("fused",)
        return layer_shapes([get_model(model)], names[0] if len(names) == 1 else names)
    ns, ks = split_sizes(n), split_sizes(k)
    if ns is None or ks is None:
        raise UsageError("which layers? Give --n and --k, or --model (see list models)")
    return tuple(Shape(a, b, layer="") for a, b in product(ns, ks))
