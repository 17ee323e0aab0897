"""Base class of kernels whose `gemm` checks its operands first."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from flexq_bench.kernels.contract import Config, LinearKernel, PackedOperand, check_gemm
from flexq_bench.workloads.gemm import GemmWorkload


class GemmCall(NamedTuple):
    """Checked arguments of LinearKernel.gemm, and the shape of the GEMM."""

    x: PackedOperand
    w: PackedOperand
    out: torch.Tensor
    bias: torch.Tensor | None
    shape: GemmWorkload


class CheckedGemm(LinearKernel):
    """A kernel that implements `compute` instead of `gemm`."""

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        self.compute(GemmCall(x, w, out, bias, check_gemm(x, w, out)), config)

    @abstractmethod
    def compute(self, call: GemmCall, config: Config | None) -> None:
        """Compute out = x · w^T + bias. config None: `default_config`."""
