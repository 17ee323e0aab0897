"""Which configuration of the int8 tensor-core kernels to run where nothing was timed.

Few tokens: a score, linear in what decides how well a grid fills the GPU, fitted to measured
times. Many tokens: waves of blocks, times the groups of k that a block goes through, times what one
group takes.
`python benchmarks/kernels/heuristic.py` measures, fits, and says what the choice loses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.cuda.imma_configs import (
    GROUP,
    MMA_ROWS,
    MOST_NATURAL,
    TILE_BYTES,
    AnyImmaConfig,
    ImmaConfig,
    TiledConfig,
    WgmmaConfig,
)
from workloads.gemm import GemmWorkload

_REGISTERS = 65536  # of an SM
_SM_SHARED_BYTES, _BLOCK_SHARED_BYTES = 227 * 1024, 1024  # usable; reserved for each block
_MOST_WARPS = 64  # of an SM
_READ_BYTES_US = 4.6e6  # of an H200's memory: only the ratio to other terms is fitted
# What the compiler takes for a thread, by row tiles and column tiles (tests/kernels/resources.csv).
_THREAD_REGISTERS = {
    (1, 1): 64,
    (2, 1): 80,
    (4, 1): 122,
    (1, 2): 100,
    (2, 2): 128,
    (3, 2): 134,
    (4, 2): 128,
    (5, 2): 168,
    (1, 4): 128,
    (2, 4): 168,
    (3, 4): 248,
}


@dataclass(frozen=True, slots=True)
class Fit:
    """How a configuration of the kernel for few tokens fits a shape on a GPU of so many SMs."""

    blocks: int
    resident: int  # blocks that one SM holds at once
    turns: int  # steps of K that the busiest warp takes
    steps: int
    sms: int

    @property
    def waves(self) -> float:
        return self.blocks / (self.sms * self.resident)


def fit_of(config: ImmaConfig, gemm: GemmWorkload, sms: int) -> Fit:
    """Blocks, residency and turns of a configuration."""
    registers = -(-_THREAD_REGISTERS[config.row_tiles, config.col_tiles] // 8) * 8
    resident = min(
        _REGISTERS // (config.threads * registers),
        _SM_SHARED_BYTES // (config.shared_bytes + _BLOCK_SHARED_BYTES),
        _MOST_WARPS // config.warps,
    )
    steps = -(-gemm.k // GROUP)
    turns = -(-steps // (config.warps * config.k_split))
    blocks = config.grid(gemm.m, gemm.n)[0]
    return Fit(blocks, max(1, resident), turns, steps, sms)


def features(config: ImmaConfig, gemm: GemmWorkload, sms: int) -> tuple[float, ...]:
    """What the score of a configuration is made of; each is 0 where it costs nothing."""
    f = fit_of(config, gemm, sms)
    late, early = float(config.late), 1.0 - config.late
    per_sm = f.blocks / sms
    unequal = math.log(math.ceil(per_sm) / per_sm)  # SMs with one block more than others
    several = float(f.waves > 1)
    tail = several * math.log(math.ceil(f.waves) / f.waves)
    empty = -math.log(min(1.0, f.waves))  # room on the SMs that the next kernel's blocks take
    idle = math.log(f.turns * config.warps * config.k_split / f.steps)
    resident_warps = min(per_sm, f.resident) * config.warps
    flight = min(f.turns, config.stages - 1) * config.row_tiles * TILE_BYTES * resident_warps
    read_us = _read_us(gemm)
    return (
        unequal * early,
        unequal * late,
        unequal * unequal,
        tail * early,
        tail * late,
        several * early,
        several * late,
        several / max(1.0, f.waves),
        empty * early,
        empty * late,
        idle,
        1.0 / f.turns,
        max(0.0, math.log(40e3 / flight)),
        max(0.0, math.log(flight / 64e3)),
        f.blocks * config.warps / 1000 / read_us,
        late,
        late / read_us,
        float(config.k_split > 1),
        float(config.stages - 2),
        float(config.row_tiles == 1),
        float(config.row_tiles == 4),
        float(config.warps == 16),
        float(config.warps == 4),
    )


# Of the features, by column tiles.
WEIGHTS: dict[int, tuple[float, ...]] = {
    1: (
        -0.230, -0.300, 0.854, 0.814, 0.644, 0.931, 0.962, -0.686, 1.205, 0.216, 0.385, 0.080,
        1.240, -0.165, 0.217, 0.064, 1.344, 0.027, 0.277, 0.035, 0.186, 0.257, 0.148,
    ),
    2: (
        0.091, -0.135, 0.018, 0.901, 0.328, 0.190, 0.118, 0.421, 1.488, 0.410, 0.560, 0.751,
        0.727, 0.839, 0.273, 0.237, 0.753, 0.006, -0.188, 0.388, 0.016, 0.061, -0.095,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Cost:
    """Microseconds: start_us of a launch; a step of K takes alone_us, or each_us times the blocks
    that share an SM, whichever is more. registers: of a thread, where fit_of doesn't know them."""

    start_us: float
    alone_us: float
    each_us: float
    registers: int = 0


# Fitted to times on an H200; the keys are the fields of the configurations.
# ImmaConfig with four column tiles, without the last field.
_FOUR_TILES = {
    (1, 4, 3, 1, 0): _Cost(1.41, 0.854, 0.329),
    (1, 8, 3, 1, 0): _Cost(1.38, 0.607, 0.879),
    (2, 4, 3, 1, 0): _Cost(1.29, 0.927, 0.543),
    (2, 8, 2, 1, 1): _Cost(1.39, 1.102, 0.055),
    (2, 8, 2, 2, 1): _Cost(2.76, 1.660, 0.022),
    (3, 4, 2, 1, 0): _Cost(1.97, 1.201, 0.626),
    (3, 4, 2, 2, 0): _Cost(2.60, 1.544, 0.041),
    (3, 4, 3, 1, 0): _Cost(2.32, 1.100, 0.573),
}
# TiledConfig.
_TILED = {
    (2, 1, 2, 4, 4, 1): _Cost(2.45, 0.704, 0.115, 100),
    (4, 1, 1, 4, 3, 1): _Cost(1.94, 0.651, 0.004, 99),
    (4, 1, 2, 4, 4, 2): _Cost(2.74, 0.489, 0.366, 101),
    (4, 2, 1, 4, 2, 2): _Cost(3.15, 0.901, 0.348, 168),
    (4, 2, 1, 4, 3, 2): _Cost(3.22, 0.843, 0.311, 166),
    (4, 2, 1, 4, 3, 4): _Cost(5.05, 0.851, 0.405, 166),
    (4, 2, 1, 4, 4, 1): _Cost(2.15, 0.526, 0.435, 166),
    (4, 2, 1, 4, 4, 2): _Cost(3.35, 0.836, 0.310, 166),
    (4, 2, 1, 8, 3, 1): _Cost(2.24, 0.905, 0.510, 229),
    (4, 2, 1, 8, 3, 2): _Cost(3.24, 0.962, 0.511, 242),
    (4, 2, 1, 8, 4, 1): _Cost(1.21, 0.907, 0.529, 229),
    (4, 2, 1, 8, 4, 2): _Cost(3.63, 0.907, 0.503, 242),
}
# WgmmaConfig.
_WGMMA = {
    (1, 1, 3, 2): _Cost(4.84, 0.625, 0.238, 115),
    (1, 1, 4, 2): _Cost(3.57, 0.662, 0.258, 115),
    (1, 1, 4, 4): _Cost(5.14, 0.587, 0.337, 115),
    (1, 2, 3, 1): _Cost(5.05, 0.562, 0.38, 166),
    (1, 2, 3, 2): _Cost(6.44, 0.652, 0.395, 166),
    (1, 2, 3, 4): _Cost(7.35, 0.851, 0.503, 166),
    (1, 2, 4, 2): _Cost(3.61, 0.742, 0.46, 166),
    (1, 4, 2, 1): _Cost(3.26, 1.4, 0.025, 254),
    (1, 4, 2, 2): _Cost(3.97, 1.55, 0.048, 254),
    (2, 4, 2, 1): _Cost(3.07, 1.5, 0.013, 254),
}
# Row tiles an SM: from here on, 17 to 32 tokens are faster in the kernel for many.
_MANY_ROWS = 4.0


def choose(configs: Sequence[AnyImmaConfig], gemm: GemmWorkload, sms: int) -> AnyImmaConfig:
    """The configuration to run of those that the GPU can run, which has so many SMs."""
    few = [c for c in configs if isinstance(c, ImmaConfig)]
    many = [c for c in configs if not isinstance(c, ImmaConfig)]
    if few and few[0].col_tiles in WEIGHTS:
        weights = WEIGHTS[few[0].col_tiles]
        return min(few, key=lambda c: _score(features(c, gemm, sms), weights))
    rows_an_sm = gemm.n / MMA_ROWS / sms
    if few and (not many or (gemm.m <= MOST_NATURAL and rows_an_sm <= _MANY_ROWS)):
        return min(few, key=lambda c: _four_tiles_us(c, gemm, sms))
    return min(many, key=lambda c: _many_us(c, gemm, sms))


def _score(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def _four_tiles_us(config: ImmaConfig, gemm: GemmWorkload, sms: int) -> float:
    key = (config.row_tiles, config.warps, config.stages, config.k_split, config.late)
    f = fit_of(config, gemm, sms)
    chunks = config.grid(gemm.m, gemm.n)[1]
    return _waves_us(_FOUR_TILES[key], f.blocks * chunks, f.resident, f.turns, gemm, sms)


def _many_us(config: TiledConfig | WgmmaConfig, gemm: GemmWorkload, sms: int) -> float:
    costs = _TILED if isinstance(config, TiledConfig) else _WGMMA
    cost = costs[tuple(config.as_dict().values())]
    registers = -(-cost.registers // 8) * 8
    resident = min(
        _REGISTERS // (config.threads * registers),
        _SM_SHARED_BYTES // (config.shared_bytes + _BLOCK_SHARED_BYTES),
    )
    x, y, _ = config.grid(gemm.m, gemm.n)
    steps = math.ceil(gemm.k / (GROUP * config.k_split))
    return _waves_us(cost, x * y, max(1, resident), steps, gemm, sms)


def _waves_us(
    cost: _Cost, blocks: int, resident: int, steps: int, gemm: GemmWorkload, sms: int
) -> float:
    """Waves of blocks, each as long as the busiest SM's; never less than reading the weights."""

    def wave_us(on_an_sm: int) -> float:
        return steps * max(cost.alone_us, cost.each_us * on_an_sm)

    whole, rest = divmod(blocks, sms * resident)
    busy_us = (
        cost.start_us + whole * wave_us(resident) + (wave_us(-(-rest // sms)) if rest else 0.0)
    )
    return float((busy_us**4 + _read_us(gemm) ** 4) ** 0.25)


def _read_us(gemm: GemmWorkload) -> float:
    bytes_a_code = (TILE_BYTES + MMA_ROWS * 2) / (MMA_ROWS * GROUP)
    return gemm.n * gemm.k * bytes_a_code / _READ_BYTES_US
