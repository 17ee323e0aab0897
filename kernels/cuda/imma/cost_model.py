"""Estimated time of a launch for many tokens: waves of blocks, from the costs of a step of K.

Costs are in candidates.toml. timed_choice.py corrects the estimates by times of similar cases:
`place_of` has their coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexq_bench.kernels.cuda.imma.configurations import (
    GROUP,
    MMA_ROWS,
    ClusterConfig,
    ManyConfig,
    PersistentConfig,
    TileFormat,
    operand_bytes,
)
from flexq_bench.kernels.cuda.timed_choice import Place
from flexq_bench.kernels.runtime.gpu import Device
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


def place_of(
    config: ManyConfig, cost: Cost, gemm: GemmWorkload, device: Device, tiles: TileFormat
) -> Place:
    """Return the cost of a configuration at a case, and its coordinates there.

    The cost is a smooth maximum of computing waves of blocks and of reading weights. A wave takes
    as long as on the busiest SM.
    """
    sms, steps = device.sms, tiles.steps(gemm.k)
    token_tiles = -(-gemm.m // config.tokens)
    added, is_aligned, starts = 0, True, 1
    if isinstance(config, PersistentConfig | ClusterConfig):
        shares = config.shares(gemm.m, gemm.n, steps, sms)
        if shares.shared:
            added = -(-steps // shares.each)
            is_whole = 0 in (shares.each % steps, steps % shares.each)
            is_aligned = is_whole and not shares.longer
        sharers = config.sharers if isinstance(config, PersistentConfig) else 1
        cluster = config.cluster if isinstance(config, PersistentConfig) else config.k_split
        outputs, at_once = -(-gemm.n // (config.rows * sharers)) * token_tiles, sms / cluster
        block_steps, waves = shares.longest, [1]  # waves: blocks on the busiest SM
    else:
        x, y, _ = config.grid(gemm.m, gemm.n)
        registers = config.threads * -(-cost.registers // 8) * 8
        shared = config.shared_bytes(tiles) + _BLOCK_SHARED_BYTES
        resident = max(1, min(_REGISTERS // registers, _SM_SHARED_BYTES // shared))
        outputs, at_once = x * y, sms * resident
        block_steps = math.ceil(gemm.k / (GROUP * config.k_split))
        whole, rest = divmod(outputs, at_once)
        waves = [*[resident] * whole, *([-(-rest // sms)] if rest else [])]
        starts = len(waves) if cost.each_wave else 1
    step_us = sum(max(cost.alone_us, cost.each_us * blocks) for blocks in waves)
    read_us = operand_bytes(gemm.n, gemm.k) / (_READ_FRACTION * device.memory_gbps * 1e3)
    us = ((starts * cost.start_us + block_steps * step_us) ** 4 + read_us**4) ** 0.25
    each = outputs / at_once
    return Place(
        math.log(us),
        (
            math.log(gemm.m) / 6,
            math.log(gemm.n / MMA_ROWS / sms) / 2,
            math.log(gemm.k / GROUP) / 10,
            math.log(each) / 10,
            math.log(math.ceil(each) / each) / 0.85,  # the imbalance of output tiles
            math.log(block_steps) / 9,
            math.log1p(added) / 16,  # blocks whose partial sums are added
            is_aligned / 10,
            math.log(us) / 6,
            math.log(read_us / us) / 3.5,
            math.log(gemm.m / (token_tiles * config.tokens)) / 5,  # how full tiles of tokens are
        ),
    )
