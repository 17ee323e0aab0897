"""Comparison of a kernel's own quantization rule with that of its number formats.

An external `LinearKernel` may round in a way of its own: its reference is computed from what its
`quantize_weight` and `quantize_activation` return. Operands that have little in common with the
real values, such as zeros, would make any result right.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.kernels.contract import LinearKernel, OperationKernel
from flexq_bench.kernels.external.described import DescribedKernel, as_plain
from flexq_bench.kernels.formats import Operand, quantize
from flexq_bench.measure.inputs import LinearInputs

# Largest error, of the results' norm: so many times that of the formats' own rule, plus this.
_MAX_ERROR_RATIO, _MAX_EXTRA_ERROR = 2.0, 0.05
_ROWS = 64  # of each operand that are compared
_MIN_RESULTS = 64  # the error of fewer says little


def own_quantization_error(
    kernel: LinearKernel, inputs: LinearInputs, w_real: torch.Tensor, seed: int
) -> str:
    """Describe an error of a kernel's own rule that is too large; empty: there is none.

    Results are compared, not operands, because a rule may rotate both of them. inputs: with real
    activations [M,K]. w_real: FP16 [N,K], the weights that inputs.w was made of. seed: of the rows
    that are compared; the kernel may know the state of torch's default generator.
    """
    x_real = inputs.x_real
    if x_real is None:
        return ""
    m, n = min(_ROWS, len(x_real)), min(_ROWS, len(w_real))
    if m * n < _MIN_RESULTS:
        return ""
    generator = torch.Generator().manual_seed(seed)
    x_rows, w_rows = (
        torch.randperm(len(real), generator=generator, device="cpu")[:rows].to(x_real.device)
        for real, rows in ((x_real, m), (w_real, n))
    )
    x_real, w_real = x_real[x_rows], w_real[w_rows]
    real = x_real.double() @ w_real.double().T
    own = _error(inputs.x.take_rows(x_rows), inputs.w.take_rows(w_rows), real)
    spec = kernel.spec
    usual = _error(quantize(x_real, spec.activation), quantize(w_real, spec.weight), real)
    if own <= _MAX_ERROR_RATIO * usual + _MAX_EXTRA_ERROR:
        return ""
    return (
        f"its own quantization changes results by {own:.0%} where {spec.weight.name} weights and "
        f"{spec.activation.name} activations change them by {usual:.1%}: quantize_weight and "
        "quantize_activation may only round differently"
    )


def has_own_rule(kernel: LinearKernel | OperationKernel) -> bool:
    """Return True if an external kernel has another rule than its formats."""
    if isinstance(kernel, DescribedKernel):
        return kernel.has_own_rule
    if not (kernel.spec.is_external and isinstance(kernel, LinearKernel)):
        return False
    rules = (
        (kernel.quantize_weight, LinearKernel.quantize_weight),
        (kernel.quantize_activation, LinearKernel.quantize_activation),
    )
    return any(getattr(own, "__func__", None) is not usual for own, usual in rules)


def plain_description(kernel: LinearKernel | OperationKernel) -> dict[str, Any]:
    """Return what other processes know of an external kernel, as JSON values."""
    return as_plain(kernel.spec, has_own_rule=has_own_rule(kernel))


def _error(x: Operand, w: Operand, real: torch.Tensor) -> float:
    """Relative error of results in the Frobenius norm; NaN where an operand has one."""
    results = x.dequantize() @ w.dequantize().T
    return float((results - real).norm() / real.norm())
