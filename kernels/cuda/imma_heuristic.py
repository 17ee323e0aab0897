"""Which configuration of the int8 tensor-core kernels to run where nothing was timed.

Few tokens: kernels/cuda/few_heuristic.py. Else waves of blocks, times the groups of k that a block
goes through, times what one group takes. `python benchmarks/kernels/heuristic.py` measures, fits,
and says what the choice loses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernels.cuda.few_heuristic import FLEXQ, Few, choose_few
from kernels.cuda.imma_configs import (
    GROUP,
    MMA_ROWS,
    MOST_NATURAL,
    SIX_BITS,
    AnyImmaConfig,
    BulkConfig,
    ImmaConfig,
    TiledConfig,
    TileFormat,
    WgmmaConfig,
)
from workloads.gemm import GemmWorkload

_REGISTERS = 65536  # of an SM
_SM_SHARED_BYTES, _BLOCK_SHARED_BYTES = 227 * 1024, 1024  # usable; reserved for each block
_BYTES_A_CODE = (1536 + 32) / 2048  # of 6-bit weights with their scales
_READ_BYTES_US = 4.6e6  # of an H200's memory

ManyConfig = TiledConfig | WgmmaConfig | BulkConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds: start_us of a launch; a step of K takes alone_us, or each_us times the blocks
    that share an SM, whichever is more. registers: of a thread."""

    start_us: float
    alone_us: float
    each_us: float
    registers: int


# Fitted to times on an H200.
COSTS: dict[ManyConfig, Cost] = {
    TiledConfig(4, 2, 1, 8, 3, 1): Cost(2.26, 0.903, 0.547, 229),
    TiledConfig(4, 2, 1, 8, 4, 1): Cost(1.24, 0.898, 0.605, 229),
    TiledConfig(4, 2, 1, 8, 3, 2): Cost(3.27, 0.962, 0.62, 242),
    TiledConfig(4, 2, 1, 8, 4, 2): Cost(3.67, 0.907, 0.611, 242),
    TiledConfig(4, 2, 1, 4, 4, 1): Cost(2.75, 0.712, 0.237, 166),
    TiledConfig(4, 2, 1, 4, 2, 2): Cost(3.23, 0.914, 0.579, 168),
    TiledConfig(4, 2, 1, 4, 3, 2): Cost(2.88, 0.944, 0.309, 166),
    TiledConfig(4, 2, 1, 4, 4, 2): Cost(3.38, 1.18, 0.313, 166),
    TiledConfig(4, 2, 1, 4, 3, 4): Cost(3.83, 1.3, 0.4, 166),
    TiledConfig(4, 1, 2, 4, 4, 2): Cost(2.77, 0.497, 0.376, 101),
    TiledConfig(4, 1, 1, 4, 3, 1): Cost(1.94, 0.651, 0.05, 99),
    TiledConfig(2, 1, 2, 4, 4, 1): Cost(2.47, 0.727, 0.115, 100),
    WgmmaConfig(1, 1, 3, 2): Cost(3.4, 1.04, 0.244, 115),
    WgmmaConfig(1, 1, 4, 2): Cost(3.16, 0.74, 0.29, 115),
    WgmmaConfig(1, 1, 4, 4): Cost(6.78, 0.486, 0.309, 115),
    WgmmaConfig(1, 2, 3, 1): Cost(0.24, 1.29, 0.335, 166),
    WgmmaConfig(1, 2, 3, 2): Cost(6.88, 1.11, 0.467, 166),
    WgmmaConfig(1, 2, 4, 2): Cost(3.83, 1.17, 0.3, 255),
    BulkConfig(1, 1, 0): Cost(0.726, 0.72, 0.72, 168),
    BulkConfig(1, 1, 1): Cost(5.03, 0.703, 0.703, 168),
    BulkConfig(2, 1, 0): Cost(0.835, 1.18, 1.18, 168),
    BulkConfig(2, 1, 1): Cost(8.55, 1.12, 1.12, 168),
    BulkConfig(2, 2, 1): Cost(3.46, 1.63, 1.63, 168),
}
# Of atom, whose groups are scaled by both sides.
MIXED_COSTS: dict[ManyConfig, Cost] = {
    **COSTS,
    TiledConfig(4, 2, 1, 8, 3, 1): Cost(2.5, 0.598, 0.488, 229),
    TiledConfig(4, 2, 1, 4, 4, 1): Cost(1.39, 0.498, 0.399, 166),
    TiledConfig(4, 2, 1, 4, 3, 2): Cost(4, 0.502, 0.231, 166),
    WgmmaConfig(1, 1, 3, 2): Cost(2.29, 0.895, 0.28, 128),
    WgmmaConfig(1, 1, 4, 4): Cost(5.93, 0.417, 0.303, 115),
    WgmmaConfig(1, 2, 3, 1): Cost(0.835, 1.24, 0.364, 168),
    WgmmaConfig(1, 2, 4, 2): Cost(5.14, 1.2, 0.422, 255),
    WgmmaConfig(2, 2, 4, 1): Cost(2.26, 1.17, 0.3, 255),
    BulkConfig(1, 1, 0): Cost(0.52, 0.68, 0.68, 168),
    BulkConfig(1, 1, 1): Cost(2.39, 0.71, 0.71, 168),
    BulkConfig(2, 1, 0): Cost(2.83, 1.08, 1.08, 168),
    BulkConfig(2, 1, 1): Cost(10.3, 0.977, 0.977, 168),
    BulkConfig(2, 2, 1): Cost(3.48, 1.48, 1.48, 168),
}
# Of group-w4a8, whose groups are scaled by the weights' side.
GROUP_SCALED_COSTS: dict[ManyConfig, Cost] = {
    **COSTS,
    TiledConfig(4, 2, 1, 8, 3, 1): Cost(2.5, 0.598, 0.488, 229),
    TiledConfig(4, 2, 1, 4, 4, 1): Cost(1.39, 0.498, 0.399, 166),
    TiledConfig(4, 2, 1, 4, 3, 2): Cost(4, 0.502, 0.231, 166),
    WgmmaConfig(1, 1, 3, 2): Cost(2.86, 0.357, 0.237, 128),
    WgmmaConfig(1, 1, 4, 4): Cost(4.55, 0.346, 0.247, 115),
    WgmmaConfig(1, 2, 3, 1): Cost(4.17, 1.33, 0.23, 168),
    WgmmaConfig(1, 2, 4, 2): Cost(5, 0.627, 0.559, 255),
    WgmmaConfig(2, 2, 4, 1): Cost(3.81, 0.979, 0.3, 255),
    BulkConfig(1, 1, 0): Cost(0.407, 0.544, 0.544, 168),
    BulkConfig(1, 1, 1): Cost(3.52, 0.559, 0.559, 168),
    BulkConfig(2, 1, 0): Cost(0.26, 0.972, 0.972, 168),
    BulkConfig(2, 1, 1): Cost(7.46, 0.857, 0.857, 168),
    BulkConfig(2, 2, 1): Cost(3.44, 1.35, 1.35, 168),
}
# Of weights whose sums stay integers over all of K: nothing is converted in between.
DUAL_GRAINED_COSTS: dict[ManyConfig, Cost] = {
    **COSTS,
    TiledConfig(4, 2, 1, 8, 3, 1): Cost(3.03, 0.449, 0.542, 229),
    TiledConfig(4, 2, 1, 4, 4, 1): Cost(2.19, 0.282, 0.468, 166),
    TiledConfig(4, 2, 1, 4, 3, 2): Cost(3.95, 0.291, 0.274, 166),
    WgmmaConfig(1, 1, 4, 2): Cost(3.98, 0.247, 0.247, 90),
    WgmmaConfig(1, 1, 4, 4): Cost(3.64, 1.03, 0.375, 115),
    WgmmaConfig(1, 2, 4, 1): Cost(1.85, 0.504, 0.252, 122),
    WgmmaConfig(1, 2, 4, 2): Cost(4.3, 0.419, 0.3, 122),
    WgmmaConfig(2, 1, 4, 1): Cost(3.83, 0.495, 0.292, 90),
    WgmmaConfig(2, 1, 4, 2): Cost(5.27, 0.293, 0.559, 90),
    WgmmaConfig(2, 2, 4, 1): Cost(4.79, 0.558, 0.38, 122),
    WgmmaConfig(2, 2, 4, 2): Cost(7.46, 0.693, 0.433, 122),
    WgmmaConfig(3, 2, 4, 1): Cost(3.11, 0.702, 0.3, 125),
}


@dataclass(frozen=True, slots=True)
class Waves:
    """Blocks of a grid as they follow each other: whole waves of `resident` blocks an SM, then one
    of `last` on the busiest SM; 0: none. steps: of K that a block's busiest warp takes,
    and what takes it as long as so many."""

    whole: int
    resident: int
    last: int
    steps: float


def choose(
    configs: Sequence[AnyImmaConfig],
    gemm: GemmWorkload,
    sms: int,
    costs: Mapping[ManyConfig, Cost] = COSTS,
    few: Few = FLEXQ,
    tiles: TileFormat = SIX_BITS,
    *,
    unseen: bool = False,
) -> AnyImmaConfig:
    """The configuration to run of those that the GPU can run, which has so many SMs.

    unseen: as of Interpolation.expected.
    """

    def estimated_us(config: ManyConfig) -> float:
        return cost_us(costs[config], waves_of(config, costs[config], gemm, sms, tiles), gemm)

    of_few = [c for c in configs if isinstance(c, ImmaConfig)]
    many = [c for c in configs if not isinstance(c, ImmaConfig)]
    rows_an_sm = gemm.n / MMA_ROWS / sms
    if of_few and (not many or (gemm.m <= MOST_NATURAL and rows_an_sm <= few.many_rows)):
        return choose_few(of_few, gemm, sms, few, unseen=unseen)
    return min(many, key=estimated_us)


def waves_of(
    config: ManyConfig, cost: Cost, gemm: GemmWorkload, sms: int, tiles: TileFormat
) -> Waves:
    """How the blocks of a configuration follow each other on a GPU."""
    if isinstance(config, BulkConfig):
        shares = config.shares(gemm.m, gemm.n, tiles.steps(gemm.k), sms)
        return Waves(0, 1, 1, shares.longest)
    x, y, _ = config.grid(gemm.m, gemm.n)
    registers = -(-cost.registers // 8) * 8
    by_registers = _REGISTERS // (config.threads * registers)
    by_shared = _SM_SHARED_BYTES // (config.shared_bytes(tiles) + _BLOCK_SHARED_BYTES)
    resident = max(1, min(by_registers, by_shared))
    steps = math.ceil(gemm.k / (GROUP * config.k_split))
    whole, rest = divmod(x * y, sms * resident)
    return Waves(whole, resident, -(-rest // sms), steps)


def read_us(gemm: GemmWorkload) -> float:
    """Reading 6-bit weights at an H200's bandwidth."""
    return gemm.n * gemm.k * _BYTES_A_CODE / _READ_BYTES_US


def cost_us(cost: Cost, waves: Waves, gemm: GemmWorkload) -> float:
    """Waves of blocks, each as long as the busiest SM's; never less than reading the weights."""

    def wave_us(on_an_sm: int) -> float:
        return waves.steps * max(cost.alone_us, cost.each_us * on_an_sm)

    busy_us = cost.start_us + waves.whole * wave_us(waves.resident)
    if waves.last:
        busy_us += wave_us(waves.last)
    return float((busy_us**4 + read_us(gemm) ** 4) ** 0.25)
