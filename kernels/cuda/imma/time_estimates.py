"""Estimated time of a launch for many tokens: a cost model, corrected by times of random cases.

configuration_choice.py calls `TimedCases.estimated_us`. The cost (`cost_us`) is the time of waves
of blocks, from the costs of a step of K in candidates.toml.

A case is a number of tokens and a shape. The logarithm of a configuration's time over its cost is
interpolated between timed cases by a Gaussian process (Rasmussen and Williams 2006, section 2.2).
Its covariance is a constant plus a sum of Matérn 3/2 covariances over coordinates of

- the case: tokens, rows per SM, steps of K, and the imbalance of output tiles;
- the output tiles: how many there are per block that runs at once, and their imbalance;
- a block's work: its steps of K, the blocks whose sums it adds, and whether shares are aligned;
- the limits: the cost, the share of it that reading weights takes, and how full tiles of tokens
  are;
- stream-K: where blocks are at different steps of K, operands larger than L2 are read again for
  each output tile. dual-w6a8 took 147 us at M = 1024 of 3488x19808, 100 with whole tiles (H100).

The tables, in the folder timed_cases, have the times of all candidates at random cases on an H100
or an H200. Both have 132 SMs; the bandwidth of the memory is in the cost. `python
benchmarks/kernels/heuristic.py` times cases, writes the tables, and reports the loss of the choice
on shapes that are in none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

import numpy as np

from flexq_bench.kernels.cuda.imma.configurations import (
    GROUP,
    MANY_KINDS,
    MMA_ROWS,
    ClusterConfig,
    ManyConfig,
    PersistentConfig,
    Shares,
    TileFormat,
    WgmmaConfig,
    operand_bytes,
    settings_of_kind,
)
from flexq_bench.kernels.cuda.shape_interpolation import Floats, json_rows, matern
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


class Part(NamedTuple):
    """A summand of the covariance: its variance, and the length scale of each coordinate.

    Coordinates are logarithms, except is_aligned.
    """

    variance: float
    scales: Mapping[str, float]


# Found by a random search for the least leave-one-out loss over all tables (`heuristic.py report`).
_PARTS = (
    Part(0.00999, {"tokens": 1.48, "rows": 0.468, "steps": 2.44, "imbalance": 18.6}),
    Part(0.00219, {"tiles": 2.56, "imbalance": 0.214}),
    Part(0.0396, {"block_steps": 2.22, "added": 4.07, "is_aligned": 2.53}),
    Part(0.00623, {"cost": 1.49, "read_share": 0.873, "filled": 1.24}),
    Part(0.0167, {"reread_share": 1.83, "beyond_l2": 1.71, "drift": 2.93}),
)
_CONSTANT = 0.00734  # variance
_NOISE = 0.00159
# Additional noise where clusters of the warpgroup kernel fill only a part of the SMs, for each
# factor of e below all of them: blocks of two clusters may be on one SM while others are empty. At
# 96 tokens with three stages flexq took 9.4 us at 768x4480 and 15.6 at 640x4992, with four stages
# 14.9 and 11.5 (H100).
_PLACEMENT_NOISE = 0.00948
_L2_BYTES = 50e6  # of an H100
_LEAST_REREAD_SHARE, _MOST_BEYOND_L2 = 0.37, 0.7  # limits of coordinates


class Coordinates(NamedTuple):
    """Coordinates of a configuration at a case, as described above."""

    tokens: float
    rows: float
    steps: float
    tiles: float
    imbalance: float
    block_steps: float
    added: float
    is_aligned: float
    cost: float
    read_share: float
    filled: float
    reread_share: float
    beyond_l2: float
    drift: float


@dataclass(frozen=True, slots=True)
class Cases:
    """Times of configurations, us [cases, configs] in microseconds; NaN: no candidate there.

    devices: of each case.
    """

    configs: tuple[ManyConfig, ...]
    cases: tuple[GemmWorkload, ...]
    devices: tuple[Device, ...]
    us: Floats


class TimedCases:
    """Estimates of the configurations of one kernel.

    name: of its table in the folder timed_cases. costs: of all configurations.
    """

    def __init__(self, name: str, costs: Mapping[ManyConfig, Cost]) -> None:
        self.name, self.costs = name, costs

    @property
    def file(self) -> Traversable:
        folder = resources.files("flexq_bench.kernels.cuda.imma") / "timed_cases"
        return folder / f"{self.name}.json"

    def estimated_us(
        self,
        config: ManyConfig,
        gemm: GemmWorkload,
        device: Device,
        tiles: TileFormat,
        *,
        unseen: bool = False,
    ) -> float:
        """Estimate the time of a launch in microseconds.

        unseen: as if no case of this N and K had been timed.
        """
        return _estimated_us(self, config, gemm, device, tiles, unseen)


@lru_cache(maxsize=1 << 16)  # called by every launch without a configuration
def _estimated_us(
    timed: TimedCases,
    config: ManyConfig,
    gemm: GemmWorkload,
    device: Device,
    tiles: TileFormat,
    unseen: bool,
) -> float:
    cost = timed.costs[config]
    here = coordinates(config, cost, gemm, device, tiles)
    return math.exp(here.cost + _process(timed, config, tiles).correction(here, gemm, unseen))


@cache
def _process(timed: TimedCases, config: ManyConfig, tiles: TileFormat) -> _Process:
    return _Process(load_cases(timed), config, timed.costs[config], tiles)


@cache
def load_cases(timed: TimedCases) -> Cases:
    """Load the table of a kernel."""
    return read_cases(timed.file.read_text())


class _Process:
    """Gaussian process of one configuration's corrections."""

    def __init__(self, table: Cases, config: ManyConfig, cost: Cost, tiles: TileFormat) -> None:
        column = table.configs.index(config) if config in table.configs else None
        us = np.full(len(table.cases), np.nan) if column is None else table.us[:, column]
        timed = np.flatnonzero(~np.isnan(us)).tolist()
        self._cases = [table.cases[row] for row in timed]
        points = [
            coordinates(config, cost, table.cases[row], table.devices[row], tiles) for row in timed
        ]
        self._points = np.array(points).reshape(-1, len(Coordinates._fields))
        logs = np.log(us[~np.isnan(us)]) - self._points[:, Coordinates._fields.index("cost")]
        noise = np.full(len(logs), _NOISE)
        if isinstance(config, WgmmaConfig) and config.k_split > 1:
            blocks = self._points[:, Coordinates._fields.index("tiles")]
            noise += _PLACEMENT_NOISE * np.maximum(0.0, -blocks)
        self._noisy = _covariance(self._points, self._points) + np.diag(noise)
        self._weights = np.linalg.solve(self._noisy, logs)

    @cached_property
    def _inverse(self) -> Floats:
        """Inverse of the noisy covariance, needed only to leave cases out."""
        return np.asarray(np.linalg.inv(self._noisy), dtype=np.float64)

    def correction(self, here: Coordinates, gemm: GemmWorkload, unseen: bool) -> float:
        """Return the expected logarithm of the time over the cost."""
        covariance = _covariance(np.array([here]), self._points)[0]
        if not unseen:
            return float(covariance @ self._weights)
        same = np.array([(case.n, case.k) == (gemm.n, gemm.k) for case in self._cases], dtype=bool)
        left_out, others = np.flatnonzero(same), np.flatnonzero(~same)
        # The weights of a process without some of its points.
        moved = np.linalg.solve(self._inverse[np.ix_(left_out, left_out)], self._weights[left_out])
        weights = self._weights[others] - self._inverse[np.ix_(others, left_out)] @ moved
        return float(covariance[others] @ weights)


def coordinates(
    config: ManyConfig, cost: Cost, gemm: GemmWorkload, device: Device, tiles: TileFormat
) -> Coordinates:
    """Return the coordinates of a configuration at a case."""
    sms, steps = device.sms, tiles.steps(gemm.k)
    waves = waves_of(config, cost, gemm, sms, tiles)
    added, is_aligned = 0, True
    token_tiles = -(-gemm.m // config.tokens)
    cost_of_launch = cost_us(cost, waves, gemm, device.memory_gbps)
    rereads = _NO_REREADS
    if isinstance(config, PersistentConfig | ClusterConfig):
        shares = config.shares(gemm.m, gemm.n, steps, sms)
        if shares.shared:
            added = -(-steps // shares.each)
            is_whole = 0 in (shares.each % steps, steps % shares.each)
            is_aligned = is_whole and not shares.longer
        if isinstance(config, PersistentConfig):
            rows, cluster = config.rows * config.sharers, config.cluster
            if shares.shared:
                rereads = _rereads(config, shares, gemm, device, steps)
        else:
            rows, cluster = config.rows, config.k_split
        at_once = sms / cluster
        output_tiles = -(-gemm.n // rows) * token_tiles
    else:
        x, y, _ = config.grid(gemm.m, gemm.n)
        output_tiles, at_once = x * y, sms * waves.resident
    per_block = output_tiles / at_once
    return Coordinates(
        tokens=math.log(gemm.m),
        rows=math.log(gemm.n / MMA_ROWS / sms),
        steps=math.log(gemm.k / GROUP),
        tiles=math.log(per_block),
        imbalance=math.log(math.ceil(per_block) / per_block) if per_block > 1 else 0.0,
        block_steps=math.log(waves.steps),
        added=math.log1p(added),
        is_aligned=float(is_aligned),
        cost=math.log(cost_of_launch),
        read_share=math.log(read_us(gemm.n, gemm.k, device.memory_gbps) / cost_of_launch),
        filled=math.log(gemm.m / (token_tiles * config.tokens)),
        reread_share=math.log(max(rereads.us / cost_of_launch, _LEAST_REREAD_SHARE)),
        beyond_l2=rereads.beyond_l2,
        drift=rereads.drift,
    )


class _Rereads(NamedTuple):
    """Time to read the operands of all output tiles of stream-K one by one, in microseconds, and
    two coordinates."""

    us: float
    beyond_l2: float
    drift: float


_NO_REREADS = _Rereads(0.0, 0.0, 0.0)


def _rereads(
    config: PersistentConfig, shares: Shares, gemm: GemmWorkload, device: Device, steps: int
) -> _Rereads:
    rows = config.rows * config.sharers
    each_us = read_us(rows, gemm.k, device.memory_gbps, config.tokens)
    beyond_l2 = math.log(operand_bytes(gemm.n, gemm.k, gemm.m) / _L2_BYTES)
    beyond_l2 = min(max(beyond_l2, -_MOST_BEYOND_L2), _MOST_BEYOND_L2)
    drift = shares.each / steps % 1  # of the steps of neighbouring clusters, in output tiles
    return _Rereads(shares.shared * each_us, beyond_l2, math.log1p(10 * min(drift, 1 - drift)))


def _covariance(a: Floats, b: Floats) -> Floats:
    covariance = np.full((len(a), len(b)), _CONSTANT)
    for part in _PARTS:
        columns = [Coordinates._fields.index(name) for name in part.scales]
        scales = np.array([*part.scales.values()])
        covariance += part.variance * matern(a[:, columns] / scales, b[:, columns] / scales)
    return covariance


def read_cases(text: str) -> Cases:
    """Parse a table that write_cases formatted."""
    content = json.loads(text)
    configs = tuple(MANY_KINDS[kind](**settings) for kind, settings in content["configs"])
    cases, devices, rows = [], [], []
    for part in content["parts"]:
        for m, n, k, *hundredths in part["rows"]:
            row = np.full(len(configs), np.nan)
            row[part["configs"]] = np.array(hundredths) / 100
            cases.append(GemmWorkload(m, n, k))
            devices.append(Device(part["sms"], part["memory_gbps"]))
            rows.append(row)
    us = np.array(rows).reshape(-1, len(configs))
    return Cases(configs, tuple(cases), tuple(devices), us)


def write_cases(table: Cases) -> str:
    """Format a table as JSON.

    A part has cases of one GPU with the same candidates: their indices, and rows of M, N, K and
    times in hundredths of a microsecond.
    """
    parts: dict[tuple[Device, tuple[int, ...]], list[Sequence[int]]] = {}
    for gemm, device, us in zip(table.cases, table.devices, table.us, strict=True):
        timed = np.flatnonzero(~np.isnan(us)).tolist()
        hundredths = np.rint(100 * us[timed]).astype(int).tolist()
        row = [gemm.m, gemm.n, gemm.k, *hundredths]
        parts.setdefault((device, tuple(timed)), []).append(row)
    configs = json_rows(map(settings_of_kind, table.configs))
    formatted = []
    for (device, of_part), rows in parts.items():
        head = json.dumps({**device._asdict(), "configs": of_part})[:-1]
        formatted.append(f'{head}, "rows": {json_rows(rows)}}}')
    return f'{{"configs": {configs}, "parts": [{", ".join(formatted)}]}}\n'
