"""Linear layers of experts on int8 tensor cores (csrc/grouped)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.grouped.packing import BLOCK_TILES, ExpertFormat
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_TOKENS
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.launch_flags import launch_flags
from flexq_bench.kernels.runtime.module import Argument, load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.kernels.runtime.occupancy import RESERVED_SHARED_BYTES
from flexq_bench.kernels.runtime.tensor_map import swizzled_rows

_MIN_SM = 90
_SHARED_BYTES = 227 * 1024  # that one block may request
_BARRIERS_BYTES = 16  # of a stage
_ALIGNMENT = 1024  # of codes in shared memory
_TOUCHED_BYTES, _COUNT_BYTES = 16, 16  # of an expert with tokens, and of their number
_LISTED = 128  # experts, of which a multiple decides the number of stages
_MARKED_WORDS = 4 * 2 * 32  # int32 of a warp's partial sums of 8 tokens
_ROW_BLOCKS, _LOADED_TOKENS = 2, 64  # of csrc/grouped/many_tokens.cu
_OUT_BYTES = _ROW_BLOCKS * BLOCK_TILES * 512
_LEAST_MANY = 16  # tokens


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

    source, function = "grouped/few_tokens.cu", "grouped_few"
    threads = BLOCK_TILES * 32 + 32

    def stage_bytes(self, fmt: ExpertFormat) -> int:
        weights = _aligned(self.groups * fmt.chunk_bytes)
        return weights + self.groups * self.col_tiles * MMA_TOKENS * GROUP

    def build(self, fmt: ExpertFormat) -> Build:
        return Build.of(
            self.source,
            min_sm=_MIN_SM,
            block=Block(self.function, self.threads, shared_bytes(self, fmt, _LISTED)),
            W_BITS=fmt.w_bits,
            **self.defines(),
        )

    def maps(self, codes: torch.Tensor) -> tuple[Argument, ...]:
        """Return the tensor maps of activations."""
        return tuple(swizzled_rows(codes, box, GROUP) for box in (8, 16, 32))

    def partial_sums(self, blocks: int) -> tuple[Argument, ...]:
        """Return memory for partial sums, and the number of the launch as their mark."""
        return launch_flags(blocks * BLOCK_TILES * self.col_tiles * _MARKED_WORDS)


@dataclass(frozen=True, slots=True)
class ManyConfig(Config):
    """Parameters of csrc/grouped/many_tokens.cu. tokens: of an output tile. stages: of the ring."""

    tokens: int
    stages: int

    source, function = "grouped/many_tokens.cu", "grouped_many"
    threads = _ROW_BLOCKS * BLOCK_TILES * 32 + 128
    resident = 1

    def stage_bytes(self, fmt: ExpertFormat) -> int:
        return _aligned(_ROW_BLOCKS * fmt.chunk_bytes) + self.tokens * GROUP

    def build(self, fmt: ExpertFormat) -> Build:
        return Build.of(
            self.source,
            only_sm=_MIN_SM,
            block=Block(self.function, self.threads, shared_bytes(self, fmt, _LISTED)),
            W_BITS=fmt.w_bits,
            **self.defines(),
        )

    def maps(self, codes: torch.Tensor) -> tuple[Argument, ...]:
        """Return the tensor map of activations."""
        return (swizzled_rows(codes, _LOADED_TOKENS, GROUP),)

    def partial_sums(self, blocks: int) -> tuple[Argument, ...]:
        """Return nothing: output tiles are computed by one block each."""
        return ()


GroupedConfig = FewConfig | ManyConfig


def shared_bytes(config: GroupedConfig, fmt: ExpertFormat, experts: int) -> int:
    """Return the dynamic shared memory of a block."""
    out = _OUT_BYTES if isinstance(config, ManyConfig) else 0
    of_stages = config.stages * (config.stage_bytes(fmt) + _BARRIERS_BYTES)
    return of_stages + out + _COUNT_BYTES + (experts + 1) * _TOUCHED_BYTES


def with_most_stages(config: GroupedConfig, fmt: ExpertFormat, experts: int) -> GroupedConfig:
    """Return the configuration with as many stages as fit in shared memory."""
    of_block = (_SHARED_BYTES + RESERVED_SHARED_BYTES) // config.resident - RESERVED_SHARED_BYTES
    free = of_block - shared_bytes(replace(config, stages=0), fmt, -(-experts // _LISTED) * _LISTED)
    return replace(config, stages=free // (config.stage_bytes(fmt) + _BARRIERS_BYTES))


def configs_for(fmt: ExpertFormat, values: Mapping[str, Any]) -> Sequence[GroupedConfig]:
    """Return the configurations for a workload of `grouped_linear`; the first is the default."""
    experts, most = values["experts"], values["tokens"]
    made: list[GroupedConfig] = [
        FewConfig(col_tiles, groups, 0, resident)
        for col_tiles, groups, resident in product((1, 2, 4), (2, 1, 4), (2, 1, 3))
        if col_tiles == 1 or col_tiles * MMA_TOKENS // 2 < most
    ]
    staged = (with_most_stages(config, fmt, experts) for config in made)
    return [config for config in staged if config.stages > 1]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def grouped_gemm(
    fmt: ExpertFormat,
    config: GroupedConfig,
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
    load_function(config.build(fmt), config.function).launch(
        (blocks, 1, 1),
        config.threads,
        (
            *config.maps(x_codes),
            chunks,
            w_scales,
            x_scales,
            sizes,
            y,
            *config.partial_sums(blocks),
            experts,
            n,
            k,
            rows_apart,
            int(is_early),
        ),
        shared_bytes=shared_bytes(config, fmt, experts),
        overlap_previous=True,
    )
