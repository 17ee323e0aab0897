"""The sum of the vectors of several GPUs, on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch


def _reference(x: torch.Tensor) -> dict[str, Any]:
    total, magnitude = x.sum(dim=0), x.abs().sum(dim=0)
    return {"y": (total.expand_as(x), magnitude.expand_as(x))}


OPERATION = Operation(
    name="all_reduce",
    summary="the sum of the vectors of several GPUs, on each of them; row i is of GPU i",
    parameters=(
        Parameter("elements", "elements of a vector", is_axis=True, maximum=1 << 30),
        Parameter("gpus", "GPUs", minimum=2, default=2, is_axis=True),
    ),
    inputs=(Input("x", ("gpus", "elements"), "dtype", "activation"),),
    outputs=(Output("y", ("gpus", "elements"), "dtype"),),
    # of each GPU, over its links: all but its own share is sent once to be added and once after
    bytes="ceil(2 * (gpus - 1) / gpus * dtype_bytes(1, elements))",
    operations="(gpus - 1) * elements",
    reference=_reference,
)
