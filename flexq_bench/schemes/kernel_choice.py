"""Choice of the kernel for the two number formats of a layer, from the registry of kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from flexq_bench.kernels.contract import KernelSpec, LinearKernel
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.kernels.registry import labels, resolve

# For formats with several kernels, of which the first without a variant is not the fastest.
_PREFERRED = ("flexq", "flexq[w6a8]", "cublaslt-w8a8", "fp16")

_MOST_BITS = 8  # of symmetric codes


def kernel_label(weight: NumberFormat, activation: NumberFormat | None) -> str | None:
    """Return the label of the kernel for these formats; None: none, see `no_kernel_reason`.

    activation None: the rounding of X is not described by a single format. The clipped share of a
    weight's range is already in its codes; that of an activation is computed by the kernel, so it
    must match. Scales of rows and groups in BF16 or FP32 are rounded to FP16 for the kernel
    (Operand.with_half_scales).
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
    supported = sorted(a.name for w, a in _chosen() if w == _codes(weight))
    if not supported:
        return f"no kernel reads {weight.name} weights"
    return (
        f"no kernel multiplies {weight.name} weights with {activation.name} activations; there is "
        f"one for {', '.join(dict.fromkeys(supported))}"
    )


def _codes(weight: NumberFormat) -> NumberFormat:
    """Return a weight's format as seen by kernels: balanced codes count as symmetric ones."""
    symmetric = weight.kind == "balanced" and weight.bits <= _MOST_BITS
    is_rounded = weight.block_rows == 1 and weight.scale in ("bf16", "fp32")
    return replace(
        weight,
        clip=1.0,
        kind="symmetric" if symmetric else weight.kind,
        scale="fp16" if is_rounded else weight.scale,
    )


@cache
def _chosen() -> dict[tuple[NumberFormat, NumberFormat], str]:
    """Map each pair of formats to the label of its kernel, for built-in kernels of whole layers."""
    by_formats: dict[tuple[NumberFormat, NumberFormat], list[KernelSpec]] = {}
    for label in labels("cuda"):
        kernel = resolve(label, "cuda")
        spec = kernel.spec
        if isinstance(kernel, LinearKernel) and spec.package is None and "linear" in spec.stages:
            by_formats.setdefault((spec.weight, spec.activation), []).append(spec)
    return {formats: min(specs, key=_rank).label for formats, specs in by_formats.items()}


def _rank(spec: KernelSpec) -> tuple[bool, bool]:
    """Sort key: preferred kernels, then those without a variant, then the registry's order."""
    return spec.label not in _PREFERRED, bool(spec.variant)
