"""BF16 peers of `grouped_linear`: PyTorch's grouped GEMM (CUTLASS), and a Triton program."""

from __future__ import annotations

import torch

from flexq_bench.kernels.external.declare import kernel
from flexq_bench.workloads.operation import OperationWorkload


@kernel(
    "grouped_linear",
    "torch-grouped-mm",
    dtype="bf16",
    backends=["cuda"],
    returns=True,
    min_capability=(9, 0),
)
def grouped_mm(
    x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, *, experts: int, layout: str
) -> torch.Tensor:
    """Multiply BF16 experts by torch's grouped GEMM; masked: by a batched one, over all rows."""
    if layout == "masked":
        return torch.bmm(x.view(experts, -1, x.shape[1]), w.mT).view(len(x), -1)
    ends = sizes.cumsum(0, dtype=torch.int32)
    y: torch.Tensor = torch._grouped_mm(x, w.mT, offs=ends)
    return y


def _programs(workload: OperationWorkload) -> list[dict[str, int]]:
    """Tokens and features of a program, and its pipeline stages; the first is the default."""
    most = int(dict(workload.values)["tokens"])
    tokens = [size for size in (16, 32, 64, 128) if size == 16 or size // 2 < most]
    return [
        {"block_tokens": size, "features": features, "stages": stages}
        for size in reversed(tokens)
        for features, stages in ((64, 4), (128, 4), (32, 6))
    ]


@kernel(
    "grouped_linear",
    "triton-experts",
    dtype="bf16",
    backends=["cuda"],
    configurations=_programs,
    package="triton>=3.2",
)
def triton_experts(
    x: torch.Tensor,
    w: torch.Tensor,
    sizes: torch.Tensor,
    y: torch.Tensor,
    *,
    tokens: int,
    layout: str,
    block_tokens: int,
    features: int,
    stages: int,
) -> None:
    """Multiply BF16 experts in one Triton program that finds its expert in the sizes."""
    from flexq_bench.kernels.external_packages import triton_experts as program

    rows_apart = tokens if layout == "masked" else 0
    program.run(x, w, sizes, y, rows_apart, block_tokens, features, stages)


KERNELS = (grouped_mm, triton_experts)
