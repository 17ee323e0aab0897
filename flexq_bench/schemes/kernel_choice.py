"""The kernel that runs a layer of two number formats, found in the registry of kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from kernels.contract import KernelSpec, LinearKernel
from kernels.formats import NumberFormat
from kernels.registry import labels, resolve

# Where several kernels take the same formats and the first that is no variant is not the fastest.
_PREFERRED = ("flexq", "flexq[w6a8]", "cublaslt-w8a8", "fp16")

_MOST_BITS = 8  # of symmetric codes


def kernel_label(weight: NumberFormat, activation: NumberFormat | None) -> str | None:
    """Label of the kernel for these formats; None: there is none, `no_kernel_reason` says why.

    activation None: no one format says how X is rounded. Which share of its range a weight's codes
    span is in the codes; that of an activation is the kernel's to compute, so that it must agree.
    """
    if activation is None:
        return None
    return _chosen().get((_codes(weight), activation))


def no_kernel_reason(weight: NumberFormat, activation: NumberFormat | None) -> str:
    """Explain, as part of a line, why no kernel runs these formats; "" if one does."""
    if kernel_label(weight, activation) is not None:
        return ""
    if activation is None:
        return (
            "no kernel takes activations with one scale of all tokens, or in GPTQ's channel order"
        )
    whole = replace(activation, clip=1.0)
    takes_whole = kernel_label(weight, whole)
    if takes_whole is not None:
        return f"{takes_whole} rounds activations to all of their range, not to {activation.clip:g}"
    beside = sorted(other.name for mine, other in _chosen() if mine == _codes(weight))
    if not beside:
        return f"no kernel reads {weight.name} weights"
    return (
        f"no kernel multiplies {weight.name} weights with {activation.name} activations; there is "
        f"one for {', '.join(dict.fromkeys(beside))}"
    )


def _codes(weight: NumberFormat) -> NumberFormat:
    """Return a weight's format as kernels read it: balanced codes count as symmetric ones."""
    symmetric = weight.kind == "balanced" and weight.bits <= _MOST_BITS
    return replace(weight, clip=1.0, kind="symmetric" if symmetric else weight.kind)


@cache
def _chosen() -> dict[tuple[NumberFormat, NumberFormat], str]:
    """Label of the kernel of each pair of formats that kernels of ours compute whole layers for."""
    by_formats: dict[tuple[NumberFormat, NumberFormat], list[KernelSpec]] = {}
    for label in labels("cuda"):
        kernel = resolve(label, "cuda")
        spec = kernel.spec
        if isinstance(kernel, LinearKernel) and spec.package is None and "linear" in spec.stages:
            by_formats.setdefault((spec.weight, spec.activation), []).append(spec)
    return {formats: min(specs, key=_rank).label for formats, specs in by_formats.items()}


def _rank(spec: KernelSpec) -> tuple[bool, bool]:
    """Sorts first what is preferred, then what is no variant; else the registry's order stays."""
    return spec.label not in _PREFERRED, bool(spec.variant)
