"""The activation function of a feed-forward block, quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch


def _reference(x: torch.Tensor, hidden: int, function: str) -> dict[str, Any]:
    import torch

    if function == "gelu":
        return {"y": torch.nn.functional.gelu(x)}
    gate, up = x[:, :hidden], x[:, hidden:]
    return {"y": torch.nn.functional.silu(gate) * up}


OPERATION = Operation(
    name="activation_quantize",
    summary="silu(gate) * up, gates before ups, or gelu(x), quantized to the activation's format",
    parameters=(
        Parameter("tokens", "tokens", is_axis=True),
        Parameter("hidden", "features of the result"),
        Parameter("function", "of the block", default="silu_mul", choices=("silu_mul", "gelu")),
    ),
    inputs=(
        Input(
            "x",
            ("tokens", "hidden * (2 if function == 'silu_mul' else 1)"),
            "dtype",
            "activation",
            "outliers",
        ),
    ),
    outputs=(Output("y", ("tokens", "hidden"), "activation"),),
    bytes=(
        "dtype_bytes(tokens * (2 if function == 'silu_mul' else 1), hidden)"
        " + activation_bytes(tokens, hidden)"
    ),
    operations="6 * tokens * hidden",
    reference=_reference,
)
