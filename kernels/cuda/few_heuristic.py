"""Which configuration of a kernel for few tokens to run where nothing was timed.

These kernels share a structure: blocks own rows of tiles, their warps share out K, each with a ring
of stages. A score, linear in what decides how well such a grid fills the GPU, is fitted to measured
times; the lowest runs. `python benchmarks/kernels/heuristic.py` measures, fits, and says what the
choice loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from workloads.gemm import GemmWorkload

_STEP_K, _ROWS = 128, 16  # of a tile
_SHARE_BYTES = 16 * 32  # a warp's sums of 16 rows and 8 tokens
_REGISTERS = 65536  # of an SM
_SM_SHARED_BYTES, _BLOCK_SHARED_BYTES = 227 * 1024, 1024  # usable; reserved for each block
_MOST_WARPS = 64  # of an SM
_READ_BYTES_US = 4.6e6  # of an H200's memory: only the ratio to other terms is fitted


class FewConfig(Protocol):
    """What ImmaConfig and WeightOnlyConfig have in common."""

    @property
    def row_tiles(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def k_split(self) -> int: ...
    @property
    def late(self) -> int: ...
    @property
    def col_tiles(self) -> int: ...


Choosable = TypeVar("Choosable", bound=FewConfig)


@dataclass(frozen=True, slots=True)
class Few:
    """A kernel for few tokens, as its score sees it.

    tile_bytes: of 16 rows and 128 k with their scales left out, scale_bytes of these. registers: of
    a thread, by row tiles and column tiles (tests/kernels/resources.csv). weights: of the features,
    by column tiles. many_rows: row tiles an SM; from here on, 17 to 32 tokens are faster in the
    kernel for many, if there is one.
    """

    tile_bytes: int
    scale_bytes: int
    registers: Mapping[tuple[int, int], int]
    weights: Mapping[int, tuple[float, ...]]
    many_rows: float = 4.0

    def read_us(self, gemm: GemmWorkload) -> float:
        """Reading the packed weights at an H200's bandwidth."""
        bytes_a_code = (self.tile_bytes + self.scale_bytes) / (_ROWS * _STEP_K)
        return gemm.n * gemm.k * bytes_a_code / _READ_BYTES_US


@dataclass(frozen=True, slots=True)
class Fit:
    """How a configuration fits a shape on a GPU of so many SMs."""

    blocks: int
    resident: int  # blocks that one SM holds at once
    turns: int  # steps of K that the busiest warp takes
    steps: int
    sms: int

    @property
    def waves(self) -> float:
        return self.blocks / (self.sms * self.resident)


def fit_of(config: FewConfig, gemm: GemmWorkload, sms: int, few: Few) -> Fit:
    """Blocks, residency and turns of a configuration."""
    registers = -(-few.registers[config.row_tiles, config.col_tiles] // 8) * 8
    ring = config.warps * config.stages * config.row_tiles * few.tile_bytes
    reduction = config.warps * config.row_tiles * config.col_tiles * _SHARE_BYTES
    resident = min(
        _REGISTERS // (config.warps * 32 * registers),
        _SM_SHARED_BYTES // (max(ring, reduction) + _BLOCK_SHARED_BYTES),
        _MOST_WARPS // config.warps,
    )
    steps = -(-gemm.k // _STEP_K)
    turns = -(-steps // (config.warps * config.k_split))
    blocks = -(-gemm.n // (_ROWS * config.row_tiles)) * config.k_split
    return Fit(blocks, max(1, resident), turns, steps, sms)


def features(config: FewConfig, gemm: GemmWorkload, sms: int, few: Few) -> tuple[float, ...]:
    """What the score of a configuration is made of; each is 0 where it costs nothing."""
    f = fit_of(config, gemm, sms, few)
    late, early = float(config.late), 1.0 - config.late
    per_sm = f.blocks / sms
    unequal = math.log(math.ceil(per_sm) / per_sm)  # SMs with one block more than others
    several = float(f.waves > 1)
    tail = several * math.log(math.ceil(f.waves) / f.waves)
    empty = -math.log(min(1.0, f.waves))  # room on the SMs that the next kernel's blocks take
    idle = math.log(f.turns * config.warps * config.k_split / f.steps)
    resident_warps = min(per_sm, f.resident) * config.warps
    ahead = min(f.turns, config.stages - 1) * config.row_tiles
    flight = ahead * few.tile_bytes * resident_warps
    weights_us = few.read_us(gemm)
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
        f.blocks * config.warps / 1000 / weights_us,
        late,
        late / weights_us,
        float(config.k_split > 1),
        float(config.stages - 2),
        float(config.row_tiles == 1),
        float(config.row_tiles >= 4),
        float(config.warps == 16),
        float(config.warps == 4),
    )


def choose_few(configs: Iterable[Choosable], gemm: GemmWorkload, sms: int, few: Few) -> Choosable:
    """The configuration of the lowest score; all have column tiles that `few` has weights for."""

    def score(config: Choosable) -> float:
        values, weights = features(config, gemm, sms, few), few.weights[config.col_tiles]
        return sum(value * weight for value, weight in zip(values, weights, strict=True))

    return min(configs, key=score)


_FLEXQ_WEIGHTS: dict[int, tuple[float, ...]] = {
    1: (
        -0.230, -0.300, 0.854, 0.814, 0.644, 0.931, 0.962, -0.686, 1.205, 0.216, 0.385, 0.080,
        1.240, -0.165, 0.217, 0.064, 1.344, 0.027, 0.277, 0.035, 0.186, 0.257, 0.148,
    ),
    2: (
        0.091, -0.135, 0.018, 0.901, 0.328, 0.190, 0.118, 0.421, 1.488, 0.410, 0.560, 0.751,
        0.727, 0.839, 0.273, 0.237, 0.753, 0.006, -0.188, 0.388, 0.016, 0.061, -0.095,
    ),
}  # fmt: skip
# Of flexq-imma.
FLEXQ = Few(
    1536,
    32,
    {
        (1, 1): 64,
        (2, 1): 80,
        (3, 1): 96,
        (4, 1): 122,
        (1, 2): 100,
        (2, 2): 128,
        (3, 2): 134,
        (4, 2): 128,
        (5, 2): 168,
        (1, 4): 128,
        (2, 4): 168,
        (3, 4): 248,
    },
    _FLEXQ_WEIGHTS,
)
_NIBBLES_WEIGHTS: dict[int, tuple[float, ...]] = {
    1: (
        0.016, 0.558, 0.346, 0.429, 0.025, 0.284, 0.367, 0.130, 0.859, 0.475, 0.676, 0.486,
        0.058, 0.002, 0.063, -0.087, 0.106, 0.387, -0.160, 0.269, -0.073, 0.052, 0.197,
    ),
    2: (
        0.284, 0.118, 0.503, 0.909, 0.298, 0.617, 0.445, -0.118, 0.507, 0.237, -1.162, 0.254,
        0.348, -0.030, 0.347, -0.142, 0.163, 0.003, 0.081, -0.267, -0.021, -0.270, 0.136,
    ),
    4: (
        0.663, 0.365, -0.365, 0.746, 0.398, -0.090, 0.147, 0.201, 0.885, -0.034, 1.017, 0.777,
        0.526, -0.001, 1.018, 0.086, -0.121, 0.245, 0.540, -0.001, -0.001, -0.001, -0.088,
    ),
}  # fmt: skip
# Of 4-bit weights whose groups are scaled one by one.
NIBBLES = Few(
    1024,
    32,
    {
        (1, 1): 56,
        (2, 1): 80,
        (3, 1): 96,
        (4, 1): 122,
        (1, 2): 80,
        (2, 2): 124,
        (3, 2): 128,
        (5, 2): 128,
        (1, 4): 154,
        (2, 4): 194,
        (3, 4): 248,
    },
    _NIBBLES_WEIGHTS,
    many_rows=6.0,
)
_DUAL_GRAINED_WEIGHTS: dict[int, tuple[float, ...]] = {
    1: (
        0.301, 0.408, 1.998, 0.343, -0.120, 0.366, 0.724, 0.036, 1.286, 0.418, 1.022, 0.290,
        0.750, 0.307, 0.133, -0.204, -0.330, 0.670, 0.458, 0.037, 0.165, 0.031, 0.425,
    ),
    2: (
        -0.237, -0.014, -0.191, 0.409, 0.197, 0.232, 0.274, 0.254, 0.603, -0.021, -0.000, -0.017,
        0.951, -0.228, 0.018, -0.057, -0.066, 0.002, 0.436, -0.180, -0.105, -0.182, -0.166,
    ),
    4: (
        0.209, 0.430, 0.258, 0.719, 0.429, 0.129, -0.166, 0.122, 0.103, -0.000, 0.225, 0.102,
        1.266, 0.143, 0.239, -0.163, -0.339, 0.834, 0.461, -0.001, -0.001, -0.002, 0.160,
    ),
}  # fmt: skip
# Of dgq, whose sums stay integers.
DUAL_GRAINED = Few(
    1024,
    32,
    {
        (1, 1): 50,
        (2, 1): 64,
        (3, 1): 79,
        (4, 1): 78,
        (1, 2): 72,
        (2, 2): 96,
        (3, 2): 118,
        (5, 2): 122,
        (1, 4): 116,
        (2, 4): 148,
        (3, 4): 168,
    },
    _DUAL_GRAINED_WEIGHTS,
    many_rows=10.0,
)
_MINIFLOATS_WEIGHTS: dict[int, tuple[float, ...]] = {
    1: (
        -0.221, 0.471, 0.543, 1.042, 0.108, 0.317, 0.388, -0.172, 1.304, 0.151, 0.975, 1.648,
        0.677, -0.084, -0.166, 0.151, 0.241, 0.169, 0.100, 0.152, -0.026, -0.074, 0.305,
    ),
    2: (
        0.194, 0.000, -0.015, 0.536, 0.006, 0.166, 0.003, 0.176, 0.888, 0.004, 0.282, 0.532,
        0.777, -1.128, 0.347, 0.011, 0.012, 0.007, 0.442, -0.063, 0.007, 0.001, -0.128,
    ),
    4: (
        -0.607, 0.615, 1.315, 1.024, 0.360, -1.013, 0.493, 0.995, 1.089, 0.255, 0.194, 0.532,
        1.333, 0.003, 1.559, -0.916, -0.758, 0.343, 0.003, 0.899, 0.003, 0.003, 0.022,
    ),
}  # fmt: skip
# Of fp6 and fp5; a row's one scale is nothing beside its weights.
MINIFLOATS = Few(
    1536,
    0,
    {
        (1, 1): 64,
        (2, 1): 80,
        (3, 1): 80,
        (4, 1): 80,
        (5, 1): 96,
        (1, 2): 102,
        (2, 2): 122,
        (3, 2): 128,
        (1, 4): 109,
        (2, 4): 129,
    },
    _MINIFLOATS_WEIGHTS,
)
