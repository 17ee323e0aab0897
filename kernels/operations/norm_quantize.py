"""A norm of each token, after an addition to the residual stream if there is one, quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch

EPS = 1e-6
_RESIDUAL = ("tokens if residual == 'add' else 0", "hidden")


def _reference(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, norm: str
) -> dict[str, Any]:
    total = x + residual if len(residual) else x
    centred = total - total.mean(dim=-1, keepdim=True) if norm == "layer" else total
    root = (centred.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    return {"y": centred / root * gamma, "total": total[: len(residual)]}


OPERATION = Operation(
    name="norm_quantize",
    summary="a norm of each token with eps 1e-6, quantized to the activation's format",
    parameters=(
        Parameter("tokens", "tokens", is_axis=True),
        Parameter("hidden", "features"),
        Parameter(
            "norm", "root mean square, or layer norm", default="rms", choices=("rms", "layer")
        ),
        Parameter(
            "residual",
            "add x to the residual stream first, which is an output too",
            default="none",
            choices=("none", "add"),
        ),
    ),
    inputs=(
        Input("x", ("tokens", "hidden"), "dtype", "activation", "outliers"),
        Input("residual", _RESIDUAL, "dtype", "activation"),
        Input("gamma", ("hidden",), "dtype", "activation", "uniform"),
    ),
    outputs=(
        Output("y", ("tokens", "hidden"), "activation"),
        Output("total", _RESIDUAL, "dtype"),
    ),
    bytes=(
        "dtype_bytes(tokens * (3 if residual == 'add' else 1), hidden)"
        " + activation_bytes(tokens, hidden)"
    ),
    operations="(5 if norm == 'layer' else 4) * tokens * hidden",
    reference=_reference,
)
