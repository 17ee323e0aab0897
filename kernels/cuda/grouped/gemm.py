"""Linear layers of experts on int8 tensor cores (csrc/grouped)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.grouped.packing import BLOCK_TILES, ExpertFormat
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_TOKENS
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.launch_flags import launch_flags
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.kernels.runtime.occupancy import RESERVED_SHARED_BYTES
from flexq_bench.kernels.runtime.tensor_map import swizzled_rows

_MIN_SM = 90
_SHARED_BYTES = 227 * 1024  # that one block may request
_BARRIERS_BYTES = 16  # of a stage
_ALIGNMENT = 1024  # of codes in shared memory
_TOUCHED_BYTES, _LISTED_EXPERTS = 16, 128  # of an expert with tokens; least number in the list
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
        of_stages = self.stages * (self.stage_bytes(fmt) + _BARRIERS_BYTES)
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
    one = FewConfig(col_tiles, groups, 1, resident)
    of_block = (_SHARED_BYTES + RESERVED_SHARED_BYTES) // resident - RESERVED_SHARED_BYTES
    of_stage = one.stage_bytes(fmt) + _BARRIERS_BYTES
    listed = -(-experts // _LISTED_EXPERTS) * _LISTED_EXPERTS
    stages = (of_block - one.shared_bytes(fmt, listed) + of_stage) // of_stage
    return FewConfig(col_tiles, groups, stages, resident)


def few_configs(fmt: ExpertFormat, values: Mapping[str, Any]) -> Sequence[FewConfig]:
    """Return the configurations for a workload of `grouped_linear`; the first is the default."""
    experts, most = values["experts"], values["tokens"]
    made = [
        few_config(fmt, experts, *choice)
        for choice in product((1, 2, 4), (2, 1, 4), (2, 1, 3))
        if choice[0] == 1 or choice[0] * MMA_TOKENS // 2 < most
    ]
    return [config for config in made if config.stages > 1]


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
    k, (experts, n) = x_codes.shape[1], w_scales.shape
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
