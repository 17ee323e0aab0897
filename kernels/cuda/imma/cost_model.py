"""Estimated times of the kernels for many tokens: waves of blocks times their steps of K.

An estimate is the first approximation of a time, which timed_cases.py corrects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexq_bench.kernels.cuda.imma.configurations import (
    GROUP,
    ClusterConfig,
    ManyConfig,
    PersistentConfig,
    TileFormat,
    operand_bytes,
)
from flexq_bench.workloads.gemm import GemmWorkload

_REGISTERS = 65536  # of an SM
_SM_SHARED_BYTES, _BLOCK_SHARED_BYTES = 227 * 1024, 1024  # usable; reserved for each block
_READ_FRACTION = 0.935  # of the peak bandwidth that a read reaches: docs/kernels/README.md


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimated time of a configuration, in microseconds, and its registers per thread.

    A step of K takes max(alone_us, each_us · blocks on the SM). start_us: per launch, or with
    each_wave per wave of blocks, because a wave begins when the previous one has ended.
    """

    start_us: float
    alone_us: float
    each_us: float
    registers: int
    each_wave: bool = False


@dataclass(frozen=True, slots=True)
class Waves:
    """Waves of blocks of a grid.

    whole: number of full waves, of `resident` blocks per SM. last: blocks of the partial wave on
    the busiest SM; 0: none. steps: steps of K of a block's busiest warp, epilogues included as
    steps. starts: waves that begin only when the previous one has ended, because the ring buffer of
    a block fills an SM, or 1 for the launch.
    """

    whole: int
    resident: int
    last: int
    steps: float
    starts: int = 1


def waves_of(
    config: ManyConfig, cost: Cost, gemm: GemmWorkload, sms: int, tiles: TileFormat
) -> Waves:
    """Return the waves of a configuration's blocks on a GPU with `sms` SMs."""
    if isinstance(config, PersistentConfig | ClusterConfig):
        shares = config.shares(gemm.m, gemm.n, tiles.steps(gemm.k), sms)
        return Waves(0, 1, 1, shares.longest)
    x, y, _ = config.grid(gemm.m, gemm.n)
    registers = -(-cost.registers // 8) * 8
    by_registers = _REGISTERS // (config.threads * registers)
    by_shared = _SM_SHARED_BYTES // (config.shared_bytes(tiles) + _BLOCK_SHARED_BYTES)
    resident = max(1, min(by_registers, by_shared))
    steps = math.ceil(gemm.k / (GROUP * config.k_split))
    whole, rest = divmod(x * y, sms * resident)
    starts = whole + (rest > 0) if cost.each_wave else 1
    return Waves(whole, resident, -(-rest // sms), steps, starts)


def read_us(n: int, k: int, memory_gbps: float, tokens: int = 0) -> float:
    """Return the time to read the operands of operand_bytes once, in microseconds."""
    return operand_bytes(n, k, tokens) / (_READ_FRACTION * memory_gbps * 1e3)


def cost_us(cost: Cost, waves: Waves, gemm: GemmWorkload, memory_gbps: float) -> float:
    """Estimate the time of a launch: a smooth maximum of computing its waves and reading weights.

    A wave takes as long as on the busiest SM.
    """

    def wave_us(blocks_per_sm: int) -> float:
        return waves.steps * max(cost.alone_us, cost.each_us * blocks_per_sm)

    busy_us = waves.starts * cost.start_us + waves.whole * wave_us(waves.resident)
    if waves.last:
        busy_us += wave_us(waves.last)
    return float((busy_us**4 + read_us(gemm.n, gemm.k, memory_gbps) ** 4) ** 0.25)
