"""Collective operations of several GPUs, through torch.distributed: NCCL, on CPUs gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexq_bench.kernels.contract import Backend, Config, KernelSpec, RankKernel
from flexq_bench.kernels.formats import FP16
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.kernels.runtime.ranks import Ranks, exchange_build


class AllReduce(RankKernel):
    """The sum of FP16 vectors, in place, as between the layers of a tensor-parallel decoder."""

    def __init__(self, backend: Backend) -> None:
        library = "NCCL" if backend == "cuda" else "gloo"
        summary = f"sum of FP16 vectors of several GPUs by {library}, through torch.distributed"
        self.spec = _spec("all-reduce", backend, summary)

    def launch(self, ranks: Ranks, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"y": ranks.add_by_library(given["x"])}


class DecoderAllReduce(RankKernel):
    """The sum of the decoder: one launch for vectors that are short enough, else the library's."""

    def __init__(self, backend: Backend) -> None:
        summary = "sum of FP16 vectors of several GPUs, up to 256 KB without a library"
        self.spec = _spec("decoder-all-reduce", backend, summary)

    def launch(self, ranks: Ranks, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"y": ranks.add(given["x"])}

    def builds(self) -> Sequence[Build]:
        return [exchange_build(2, largest=largest) for largest in (False, True)]

    def builds_for(self, workload: Any, config: Config | None) -> Sequence[Build]:
        return [exchange_build(workload.gpus, largest=False)]


def _spec(name: str, backend: Backend, summary: str) -> KernelSpec:
    return KernelSpec(
        *(name, backend, FP16, FP16, summary),
        stages=("op",),
        operation="all_reduce",
        reads_weights=False,
    )
