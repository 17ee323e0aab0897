"""Collective operations of several GPUs, through torch.distributed: NCCL, on CPUs gloo."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexq_bench.kernels.contract import Backend, KernelSpec, RankKernel
from flexq_bench.kernels.formats import FP16
from flexq_bench.kernels.runtime.ranks import Ranks


class AllReduce(RankKernel):
    """The sum of FP16 vectors, in place, as between the layers of a tensor-parallel decoder."""

    def __init__(self, backend: Backend) -> None:
        library = "NCCL" if backend == "cuda" else "gloo"
        self.spec = KernelSpec(
            "all-reduce",
            backend,
            FP16,
            FP16,
            f"sum of FP16 vectors of several GPUs by {library}, through torch.distributed",
            stages=("op",),
            operation="all_reduce",
            reads_weights=False,
        )

    def launch(self, ranks: Ranks, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"y": ranks.add(given["x"])}
