"""Linear layers of experts on a CPU: int8 weights, one integer GEMM for each expert, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexq_bench.kernels.external.declare import kernel
from flexq_bench.kernels.external.function_kernel import FunctionDefinition
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.dual_grained import int8_values
from flexq_bench.kernels.operations.grouped_linear import rows_of_experts

_GROUP = 128


def int8_experts(
    codes: torch.Tensor, scales: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 weights [experts, N, K] and FP16 scales of output features [experts, N].

    The arguments are the tensors of a format: codes and scales of rows; or codes, integer scales of
    groups, FP16 scales of rows, and zero points if codes have 4 bits. Raises ShapeError if a
    weight does not fit int8.
    """
    if not others:
        return codes, scales[..., 0].contiguous()
    row_scales, zero_points = others[0], others[1] if others[1:] else None
    bits = 6 if zero_points is None else 4
    weights = []
    for e, of_expert in enumerate(codes):
        zeros = None if zero_points is None else zero_points[e]
        operand = Operand(of_expert, scales[e], bits, _GROUP, zeros, row_scales=row_scales[e])
        weights.append(int8_values(operand))
    return torch.stack(weights), row_scales[..., 0].contiguous()


def _quantized(
    name: str, dtype: str, **declared: Any
) -> Callable[[Callable[..., Any]], FunctionDefinition]:
    """Return what declares a kernel of quantized experts, with results of this type."""
    variant = "" if dtype == "fp16" else dtype
    return kernel(
        "grouped_linear", name, dtype=dtype, variant=variant, backends=["cpu"], **declared
    )


def _by_rows(name: str, weight: NumberFormat, summary: str, dtype: str) -> FunctionDefinition:
    @_quantized(
        name,
        dtype,
        weight=weight.name,
        activation="int8/row@fp32",
        prepare_weight=int8_experts,
        summary=summary,
    )
    def grouped(
        codes: torch.Tensor,
        scales: torch.Tensor,
        weights: torch.Tensor,
        row_scales: torch.Tensor,
        sizes: torch.Tensor,
        y: torch.Tensor,
        *,
        tokens: int,
        layout: str,
    ) -> None:
        for expert, rows in enumerate(rows_of_experts(sizes, tokens, layout)):
            # Sums of int8 products stay under 2^53, so float64 is exact.
            sums = codes[rows].double() @ weights[expert].double().T
            y[rows] = (sums * row_scales[expert].double() * scales[rows].double()).to(y.dtype)

    return grouped


def _by_groups(name: str, activation: str, dtype: str) -> FunctionDefinition:
    summary = f"{name.removeprefix('grouped-')} of experts"

    @_quantized(name, dtype, weight="int6/128", activation=activation, summary=summary)
    def grouped(
        codes: torch.Tensor,
        scales: torch.Tensor,
        w: torch.Tensor,
        w_scales: torch.Tensor,
        sizes: torch.Tensor,
        y: torch.Tensor,
        *,
        tokens: int,
        layout: str,
    ) -> None:
        for expert, rows in enumerate(rows_of_experts(sizes, tokens, layout)):
            # A code times its scale has at most 19 bits.
            x = codes[rows].double() * _wide(scales[rows], codes)
            y[rows] = (x @ (w[expert].double() * _wide(w_scales[expert], codes)).T).to(y.dtype)

    return grouped


def _wide(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The scale of each code of a row, from those of groups."""
    return scales.double().repeat_interleave(_GROUP, dim=1)[:, : codes.shape[1]]


def dense(dtype: str) -> FunctionDefinition:
    """Return the kernel of FP16 or BF16 experts."""

    @kernel(
        "grouped_linear",
        f"grouped-{dtype}",
        dtype=dtype,
        backends=["cpu"],
        summary=f"{dtype.upper()} experts",
    )
    def grouped(
        x: torch.Tensor,
        w: torch.Tensor,
        sizes: torch.Tensor,
        y: torch.Tensor,
        *,
        tokens: int,
        layout: str,
    ) -> None:
        for expert, rows in enumerate(rows_of_experts(sizes, tokens, layout)):
            y[rows] = (x[rows].float() @ w[expert].float().T).to(y.dtype)

    return grouped


DTYPES = ("fp16", "bf16")  # of outputs
_DUAL = {bits: NumberFormat(bits, _GROUP, kind="dual") for bits in (6, 4)}
DUAL_W6A8, DGQ_W4A8, W8A8, FLEXQ_W6A6, FLEXQ_W6A8 = (
    [_by_rows("grouped-dual-w6a8", _DUAL[6], "dual-w6a8 of experts", dtype) for dtype in DTYPES],
    [_by_rows("grouped-dgq-w4a8", _DUAL[4], "dgq-w4a8 of experts", dtype) for dtype in DTYPES],
    [_by_rows("grouped-w8a8", NumberFormat(8), "W8A8 of experts", dtype) for dtype in DTYPES],
    [_by_groups("grouped-flexq-w6a6", "int6/128", dtype) for dtype in DTYPES],
    [_by_groups("grouped-flexq-w6a8", "int8/128", dtype) for dtype in DTYPES],
)
