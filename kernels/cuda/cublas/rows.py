"""Quantization before a library's 8-bit GEMM and scaling after it, row by row (csrc/cublas)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Build

_THREADS, _FEATURES = 128, 4  # of scale_sums: per block, per thread
_GROUP = 128  # of quantize_groups
_ROW_THREADS = 1024  # of quantize_rows, one block per token


@dataclass(frozen=True, slots=True)
class RowKernels:
    """The two kernels for one kind of codes: int8 or FP8 (E4M3), or either as halves."""

    build: Build

    def quantize(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        static_scale: torch.Tensor | None = None,
        *,
        in_mma_order: bool = False,
    ) -> None:
        """Quantize x FP16 [M,K] to codes [>= M, padded K] and scales FP32 [M].

        Codes have one byte, or are halves of the same values.

        static_scale: FP32 [1], of all rows. None: one scale per row. in_mma_order: each 128 k in
        the order of csrc/imma/mma_order.cuh; K is padded to a multiple of 128.
        """
        m, k = x.shape
        sizes = (k, codes.shape[1])
        arguments = (x.contiguous(), codes, scales, *sizes, static_scale, int(in_mma_order))
        function = load_function(self.build, "quantize_rows")
        function.launch((m, 1, 1), _ROW_THREADS, arguments, overlap_previous=True)

    def quantize_groups(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group: int
    ) -> None:
        """Quantize x FP16 [M,K] to E4M3 as halves, [>= M, padded K], with a scale for each group.

        scales: FP32 [groups, >= M]. group: 128.
        """
        assert group == _GROUP
        m, k = x.shape
        arguments = (x.contiguous(), codes, scales, m, k, codes.shape[1])
        function = load_function(self.build, "quantize_groups")
        function.launch((*scales.shape, 1), 32, arguments, overlap_previous=True)

    def scale(
        self,
        sums: torch.Tensor,
        x_scales: torch.Tensor,
        w_scales: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Compute out FP16 [M,N] = sums [>= M, >= N] · x_scales [M] · w_scales [N] + bias [N].

        x_scales: FP32. w_scales: FP16.
        """
        m, n = out.shape
        arguments = (sums, x_scales, w_scales, bias, out, n, sums.shape[1])
        function = load_function(self.build, "scale_sums")
        grid = (-(-n // (_THREADS * _FEATURES)), m, 1)
        function.launch(grid, _THREADS, arguments, overlap_previous=True)


INT8_ROWS = RowKernels(Build.of("cublas/rows.cu"))
FP8_ROWS = RowKernels(Build.of("cublas/rows.cu", min_sm=89, E4M3=1))
# The same codes as halves, by the kind of the format.
CODES_AS_HALVES = {
    "symmetric": RowKernels(Build.of("cublas/rows.cu", HALVES=1)),
    "float": RowKernels(Build.of("cublas/rows.cu", E4M3=1, HALVES=1)),
}
