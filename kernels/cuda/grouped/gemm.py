"""Linear layers of experts on int8 tensor cores (csrc/grouped)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.grouped.packing import BLOCK_TILES, ExpertFormat
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_TOKENS
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.launch_flags import launch_flags
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.kernels.runtime.tensor_map import swizzled_rows

_MIN_SM = 90
_SHARED_BYTES = 227 * 1024  # of an SM's blocks; each block has 1 KB more
_ALIGNMENT = 1024  # of codes in shared memory
_TOUCHED_BYTES = 16  # of an expert with tokens
_COUNT_BYTES = 16
_MARKED_WORDS = 4 * 2 * 32  # int32 of a warp's partial sums of 8 tokens
_LOADED_TOKENS = (8, 16, 32)  # by one TMA load


@dataclass(frozen=True, slots=True)
class FewConfig(Config):
    """Parameters of csrc/grouped/few_tokens.cu.

    col_tiles: eights of tokens of an output tile. groups: of k in a stage. resident: blocks of an
    SM. stages: of the ring.
    """

    col_tiles: int
    groups: int
    stages: int
    resident: int

    function = "grouped_few"
    threads = BLOCK_TILES * 32 + 32

    def stage_bytes(self, fmt: ExpertFormat) -> int:
        weights = -(-self.groups * fmt.chunk_bytes // _ALIGNMENT) * _ALIGNMENT
        return weights + self.groups * self.col_tiles * MMA_TOKENS * GROUP

    def shared_bytes(self, fmt: ExpertFormat, experts: int) -> int:
        of_stages = self.stages * (self.stage_bytes(fmt) + 16)  # two mbarriers
        return of_stages + _COUNT_BYTES + (experts + 1) * _TOUCHED_BYTES

    def build(self, fmt: ExpertFormat) -> Build:
        block = Block(self.function, self.threads, self.shared_bytes(fmt, 128))
        return Build.of(
            "grouped/few_tokens.cu",
            min_sm=_MIN_SM,
            block=block,
            W_BITS=fmt.w_bits,
            **self.defines(),
        )


def few_config(
    fmt: ExpertFormat, experts: int, col_tiles: int, groups: int, resident: int
) -> FewConfig:
    """Return the configuration with as many stages as fit."""
    stage = FewConfig(col_tiles, groups, 1, resident).stage_bytes(fmt)
    of_block = (
        (_SHARED_BYTES + 1024) // resident - 1024 - (experts + 1) * _TOUCHED_BYTES - _COUNT_BYTES
    )
    return FewConfig(col_tiles, groups, of_block // (stage + 16), resident)


def grouped_gemm(
    fmt: ExpertFormat,
    config: FewConfig,
    x_codes: torch.Tensor,
    x_scales: torch.Tensor,
    chunks: torch.Tensor,
    w_scales: torch.Tensor,
    sizes: torch.Tensor,
    y: torch.Tensor,
    *,
    rows_apart: int = 0,
    is_early: bool = False,
) -> None:
    """Compute y[rows of e] = x[rows of e] · w[e]^T for each expert e.

    x_codes: int8 [rows, K], scales FP32 [rows]. chunks: of `pack_experts`, w_scales FP16
    [experts, N]. sizes: int32 [experts]. y: FP16 [rows, N]. rows_apart: 0 if rows are contiguous.
    is_early: sizes were written before the previous kernel of the stream started.
    """
    (rows, k), (experts, n) = x_codes.shape, w_scales.shape
    if k % 16:  # rows of a tensor map are aligned to 16 bytes
        x_codes = functional.pad(x_codes, (0, -k % 16))
    blocks = current_gpu().sms * config.resident
    marks = launch_flags(blocks * BLOCK_TILES * config.col_tiles * _MARKED_WORDS)
    maps = (swizzled_rows(x_codes, box, GROUP) for box in _LOADED_TOKENS)
    load_function(config.build(fmt), config.function).launch(
        (blocks, 1, 1),
        config.threads,
        (
            *maps,
            chunks,
            w_scales,
            x_scales,
            sizes,
            y,
            *marks,
            experts,
            n,
            k,
            rows_apart,
            int(is_early),
        ),
        shared_bytes=config.shared_bytes(fmt, experts),
        overlap_previous=True,
    )
