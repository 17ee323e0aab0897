"""A linear kernel bound to the case and the device that it is measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import KernelSpec, LinearKernel
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A kernel, a case of it and a device. spec: of the kernel, which its code can't change."""

    kernel: LinearKernel
    spec: KernelSpec
    case: Case
    device: torch.device

    @property
    def gemm(self) -> GemmWorkload:
        return self.case.gemm
