"""One linear layer with what a kernel may fuse behind it: Y = f(X·W^T + bias) + residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch

_STEEPEST = 1.13  # slope of any of the functions


def _reference(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, function: str
) -> dict[str, Any]:
    import torch

    y, magnitude = x @ w.T, x.abs() @ w.abs().T
    if len(bias):
        y, magnitude = y + bias, magnitude + bias.abs()
    if function != "none":
        y, magnitude = getattr(torch.nn.functional, function)(y), magnitude * _STEEPEST
    if len(residual):
        y, magnitude = y + residual, magnitude + residual.abs()
    return {"y": (y, magnitude)}


OPERATION = Operation(
    name="linear_epilogue",
    summary="a linear layer with a bias, an activation function or a residual: f(X·W^T + b) + R",
    parameters=(
        Parameter("m", "tokens", is_axis=True),
        Parameter("n", "output features"),
        Parameter("k", "input features"),
        Parameter("bias", "of each output feature", default="add", choices=("none", "add")),
        Parameter(
            "function",
            "of the sum",
            default="none",
            choices=("none", "relu", "gelu", "silu"),
        ),
        Parameter("residual", "added last", default="none", choices=("none", "add")),
    ),
    inputs=(
        Input("x", ("m", "k"), "activation", "activation", "outliers"),
        Input("w", ("n", "k"), "weight", "weight", "weight"),
        Input("bias", ("n if bias == 'add' else 0",), "dtype", "activation"),
        Input("residual", ("m if residual == 'add' else 0", "n"), "dtype", "activation"),
    ),
    outputs=(Output("y", ("m", "n"), "dtype"),),
    bytes="weight_bytes(n, k)",
    operations="2 * m * n * k",
    reference=_reference,
)
