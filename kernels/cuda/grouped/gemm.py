"""Linear layers of experts on int8 tensor cores (csrc/grouped)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.grouped.packing import BLOCK_TILES, FOUR, SIX, ExpertFormat
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_ROWS, MMA_TOKENS
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
_LISTED_BYTES, _STATE_BYTES = 20, 16  # of an expert in the list of those with tokens; of its length
_LISTED = 128  # experts, of which a multiple decides the number of stages
_MARKED_WORDS = 4 * 2 * 32  # int32 of a warp's partial sums of 8 tokens
_FRAGMENT_BYTES = 512  # of a warp's accumulators of 8 tokens, and of its outputs of 16 tokens
_WARPGROUPS, _LOADED_TOKENS = 2, 64  # of csrc/grouped/many_tokens.cu
_LEAST_MANY = 16  # tokens
# Groups, sets, resident and launched blocks of few_tokens.cu, by col_tiles: those that were fastest
# in some case, without spills.
# Two or three blocks of an SM, which leave room for the next launch's; blocks that fill an SM.
_TWO_BLOCKS, _THREE_BLOCKS, _FULL = (2, 1, 4, 2), (3, 1, 4, 3), (4, 1, 3, 3)
_THREE_OF_FOUR_BITS, _FULL_OF_FOUR_BITS = (2, 1, 4, 3), (4, 1, 4, 4)
_ONE_COLUMN = (_TWO_BLOCKS, _THREE_BLOCKS, _THREE_OF_FOUR_BITS, _FULL, _FULL_OF_FOUR_BITS)
_MORE_COLUMNS = ((4, 2, 2, 2), (2, 2, 2, 2), (2, 1, 3, 3))
_FEW_TOKENS, _SOME_TOKENS = 6, 24  # of an expert, their mean: of the choice without tuning
_TILE_TIMES = {128: 1.0, 256: 1.75}  # of an output tile, by its tokens; K of 704, 2816 and 7168
_SMS = 132  # of an H100 and an H200


@dataclass(frozen=True, slots=True)
class FewConfig(Config):
    """Parameters of csrc/grouped/few_tokens.cu.

    col_tiles: eights of tokens of an output tile. groups: of k in a stage. sets: of consumer warps.
    resident: blocks that fit on an SM. blocks: that are launched for each SM. stages: of the ring.
    """

    col_tiles: int
    groups: int
    sets: int
    resident: int
    blocks: int
    stages: int = 0

    source, function = "grouped/few_tokens.cu", "grouped_few"

    @property
    def threads(self) -> int:
        return (self.sets * BLOCK_TILES + 1) * 32

    def stage_bytes(self, fmt: ExpertFormat) -> int:
        weights = _aligned(self.groups * fmt.chunk_bytes)
        return weights + self.groups * self.col_tiles * MMA_TOKENS * GROUP

    @property
    def sums_bytes(self) -> int:
        """Bytes of sums that sets of warps exchange."""
        return 2 * (self.sets - 1) * BLOCK_TILES * self.col_tiles * _FRAGMENT_BYTES

    def build(self, fmt: ExpertFormat, *, bfloat: bool = False) -> Build:
        return Build.of(
            self.source,
            only_sm=_MIN_SM,
            block=Block(self.function, self.threads, shared_bytes(self, fmt, _LISTED)),
            W_BITS=fmt.w_bits,
            ELEMENT=fmt.element,
            **({"HALF_SCALES": 1} if fmt.half_scales else {}),
            **({"BFLOAT": 1} if bfloat else {}),
            COL_TILES=self.col_tiles,
            GROUPS=self.groups,
            SETS=self.sets,
            STAGES=self.stages,
            RESIDENT=self.resident,
        )

    def maps(self, codes: torch.Tensor) -> tuple[Argument, ...]:
        """Return the tensor maps of activations."""
        return tuple(swizzled_rows(codes, box, GROUP) for box in (1, 8, 16, 32))

    def partial_sums(self, blocks: int) -> tuple[Argument, ...]:
        """Return memory for partial sums, and the number of the launch as their mark."""
        return launch_flags(blocks * BLOCK_TILES * self.col_tiles * _MARKED_WORDS)


@dataclass(frozen=True, slots=True)
class ManyConfig(Config):
    """Parameters of csrc/grouped/many_tokens.cu.

    tile_tokens: of an output tile. stages: of the ring.
    """

    tile_tokens: int
    stages: int = 0

    source, function = "grouped/many_tokens.cu", "grouped_many"
    threads = _WARPGROUPS * BLOCK_TILES * 32 + 128
    resident = blocks = 1
    sums_bytes = _WARPGROUPS * BLOCK_TILES * _FRAGMENT_BYTES

    def stage_bytes(self, fmt: ExpertFormat) -> int:
        return _aligned(_WARPGROUPS * fmt.chunk_bytes) + self.tile_tokens * GROUP

    def build(self, fmt: ExpertFormat, *, bfloat: bool = False) -> Build:
        return Build.of(
            self.source,
            only_sm=_MIN_SM,
            block=Block(self.function, self.threads, shared_bytes(self, fmt, _LISTED)),
            W_BITS=fmt.w_bits,
            TOKENS=self.tile_tokens,
            STAGES=self.stages,
            **({"BFLOAT": 1} if bfloat else {}),
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
    of_stages = config.stages * (config.stage_bytes(fmt) + _BARRIERS_BYTES)
    return of_stages + config.sums_bytes + _STATE_BYTES + (experts + 1) * _LISTED_BYTES


def with_most_stages(config: GroupedConfig, fmt: ExpertFormat, experts: int) -> GroupedConfig:
    """Return the configuration with as many stages as fit in shared memory."""
    of_block = (_SHARED_BYTES + RESERVED_SHARED_BYTES) // config.resident - RESERVED_SHARED_BYTES
    free = of_block - shared_bytes(replace(config, stages=0), fmt, -(-experts // _LISTED) * _LISTED)
    return replace(config, stages=free // (config.stage_bytes(fmt) + _BARRIERS_BYTES))


def candidates(fmt: ExpertFormat, experts: int, tokens: int) -> list[GroupedConfig]:
    """Return all configurations for up to `tokens` tokens of an expert."""
    made: list[GroupedConfig] = [FewConfig(1, *choice) for choice in _ONE_COLUMN]
    for col_tiles in (2, _most_columns(fmt)):
        if col_tiles * MMA_TOKENS // 2 < tokens:
            made += [FewConfig(col_tiles, *choice) for choice in _MORE_COLUMNS]
    if tokens > _LEAST_MANY and fmt.for_many:
        made += [ManyConfig(of_tile) for of_tile in (64, 128, 256)]
    staged = (with_most_stages(config, fmt, experts) for config in made)
    return list(dict.fromkeys(config for config in staged if config.stages > 1))


def _most_columns(fmt: ExpertFormat) -> int:
    """Return the most column tiles that need no more registers than there are."""
    return 2 if fmt.half_scales else 4


def configs_for(fmt: ExpertFormat, values: Mapping[str, Any]) -> Sequence[GroupedConfig]:
    """Return the configurations for parameters of `grouped_linear`; the first is the default.

    The default follows from the mean number of tokens of an expert that has some, and from the row
    blocks of all such experts, if tokens are routed evenly. With few of them it leaves room on an
    SM, where the next launch's blocks load their weights meanwhile.
    """
    experts, rows = values["experts"], values["tokens"] * values["top_k"]
    touched = _touched(experts, rows, values["top_k"])
    mean, row_blocks = rows / touched, touched * -(-values["n"] // (BLOCK_TILES * MMA_ROWS))
    few = _TWO_BLOCKS
    if row_blocks > 2 * _SMS and fmt.w_bits < 8:
        choices = (
            (_THREE_OF_FOUR_BITS, _FULL_OF_FOUR_BITS) if fmt is FOUR else (_THREE_BLOCKS, _FULL)
        )
        few = choices[row_blocks > 4 * _SMS]
    default: GroupedConfig = FewConfig(1, *few)
    if mean > _SOME_TOKENS and fmt.for_many:
        default = ManyConfig(_tile_tokens(touched, mean, values["n"]))
    elif mean > _FEW_TOKENS:
        default = FewConfig(_most_columns(fmt), 4, 2, 2, 2)
    first = with_most_stages(default, fmt, experts)
    if first.stages == 1:  # of 8 bits
        first = with_most_stages(FewConfig(4, 2, 2, 2, 2), fmt, experts)
    others = candidates(fmt, experts, values["tokens"])
    return [first, *(config for config in others if config != first)]


def layer_configs(
    fmt: ExpertFormat, experts: int, rows: int, top_k: int
) -> tuple[GroupedConfig, GroupedConfig] | None:
    """Return the default configurations of both linear layers of a layer if they have few tokens.

    Their blocks fill SMs. None: each has its own default.
    """
    if fmt not in (SIX, FOUR) or rows / _touched(experts, rows, top_k) > _FEW_TOKENS:
        return None
    config = with_most_stages(FewConfig(1, *_FULL), fmt, experts)
    return config, config


def _touched(experts: int, rows: int, top_k: int) -> float:
    """Return the expected number of experts with rows, if tokens are routed evenly."""
    return max(top_k, experts * (1 - (1 - 1 / experts) ** rows))


def _tile_tokens(experts: float, tokens: float, n: int) -> int:
    """Return the tokens of an output tile for which all tiles take least time, in whole waves."""

    def time_of(tile: int) -> float:
        tiles = experts * -(-n // (_WARPGROUPS * BLOCK_TILES * MMA_ROWS)) * -(-tokens // tile)
        return math.ceil(tiles / _SMS) * _TILE_TIMES[tile]

    return min(_TILE_TIMES, key=time_of)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def grouped_gemm(
    fmt: ExpertFormat,
    config: GroupedConfig,
    x_codes: torch.Tensor,
    x_scales: torch.Tensor | None,
    chunks: torch.Tensor,
    w_scales: torch.Tensor | None,
    sizes: torch.Tensor,
    y: torch.Tensor,
    *,
    rows_apart: int = 0,
    published: tuple[torch.Tensor | None, int] = (None, 0),
) -> None:
    """Compute y[rows of e] = x[rows of e] · w[e]^T for each expert e.

    x_codes: int8 [rows, K], scales FP32 [rows], of FLEXQ FP16 [rows, K/128]. chunks: of
    `pack_experts`, w_scales FP16 [experts, N]. sizes: int32 [experts]. y: FP16 or BF16 [rows, N].
    rows_apart: 0 if rows are contiguous. Weights are loaded before the previous kernel has ended.
    published: int32 [1], and the number to which an earlier kernel that may still run sets it once
    sizes are written; None: sizes are any kernel's.
    FP16 and BF16: x_codes are the values viewed as int8 [rows, 2 * K], without scales; y has their
    type.
    """
    k, experts, n = x_codes.shape[1], len(sizes), y.shape[1]
    if k % 16:  # rows of a tensor map are aligned to 16 bytes
        x_codes = functional.pad(x_codes, (0, -k % 16))
    blocks = current_gpu().sms * config.blocks
    bfloat = y.dtype == torch.bfloat16 and not fmt.element
    load_function(config.build(fmt, bfloat=bfloat), config.function).launch(
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
            len(x_codes),
            rows_apart,
            *((x_codes, *published) if isinstance(config, FewConfig) else ()),
        ),
        shared_bytes=shared_bytes(config, fmt, experts),
        overlap_previous=True,
    )
