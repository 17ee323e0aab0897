"""Choice of a configuration where nothing was tuned, by one mechanism for all kernels.

The `default_config` of a kernel calls `TimedChoice.choose` or `choose_few`. A case that was timed
gets its fastest configuration. Elsewhere the time of each is estimated: its cost, if the kernel has
a model of it, times a correction interpolated between the nearest timed cases (simple kriging with
a Matérn 3/2 covariance: Rasmussen and Williams 2006, sections 2.2 and 4.2.1). Near are cases with
similar coordinates, of the shape and of the work that this configuration makes of it.

Tables are in the folder timed_cases: times at random shapes on an H100 or H200, by
`python benchmarks/kernels/heuristic.py`, which also reports the loss on shapes that are in none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

MANY_TOKENS = 0  # group of a table whose configurations are not for a number of column tiles
_STEP_K, _ROWS, _TOKENS = 128, 16, 8  # of a tile
_NEAREST = 32  # timed cases that correct an estimate; 24 to 64 lose the same
_NOISE = 0.033  # variance of a time over that of a correction
_MIN_CASES = 12  # that a configuration needs
_SIMILAR = 0.5  # distance to the cases of a similar kernel
_SAME_BANDWIDTH = 0.1  # relative: GPUs whose fastest configurations are the same
PER_UNIT = 1000  # of a number in a file

Floats = NDArray[np.float64]


class Place(NamedTuple):
    """Place of a configuration at a case. cost: logarithm of its estimated time; None: no model,
    so that it comes last if it was not timed. coordinates: in units of their length scales."""

    cost: float | None
    coordinates: tuple[float, ...]


PlaceOf = Callable[[Any, GemmWorkload, Device], Place]
ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True)
class TimedCases:
    """Times of configurations at cases.

    configs: as returned by name_of. devices: the GPU of each case. us: [cases, configs], in
    microseconds, or relative to the fastest if only that is known; NaN: not timed.
    """

    configs: tuple[str, ...]
    cases: tuple[GemmWorkload, ...]
    devices: tuple[Device, ...]
    us: Floats


class _Known(NamedTuple):
    """A configuration's timed cases: points [cases, coordinates], the logarithms of its times over
    its cost or else over those of the others, and N and K."""

    points: Floats
    logs: Floats
    shapes: Floats


class TimedChoice:
    """Choice from the table `name`. like: a similar kernel, whose cases are further neighbours.

    is_blind: choose as if the N and K of a case had not been timed.
    """

    def __init__(self, name: str, like: TimedChoice | None = None) -> None:
        self.name, self._like, self.is_blind = name, like, False
        self._known_cases: dict[tuple[object, ...], _Known] = {}
        self._chosen: dict[tuple[object, ...], Any] = {}

    @property
    def file(self) -> Traversable:
        return resources.files("flexq_bench.kernels.cuda") / "timed_cases" / f"{self.name}.json"

    @cached_property
    def tables(self) -> dict[int, TimedCases]:
        """Tables by group: tokens that a block of its configurations has, or MANY_TOKENS."""
        return read_tables(self.file.read_text())

    def choose(
        self,
        configs: Sequence[ConfigT],
        gemm: GemmWorkload,
        device: Device,
        place: PlaceOf,
        group: int = MANY_TOKENS,
    ) -> ConfigT:
        """Return the configuration to run."""
        key = (tuple(configs), gemm, device, place, group, self.is_blind)
        if key not in self._chosen:
            us = {} if self.is_blind else self._timed(group, gemm, device)
            timed = [config for config in configs if name_of(config) in us]
            if timed:
                self._chosen[key] = min(timed, key=lambda config: us[name_of(config)])
            else:
                at = gemm, device, place, group
                self._chosen[key] = min(configs, key=lambda config: self._log_us(config, *at))
        chosen: ConfigT = self._chosen[key]
        return chosen

    def choose_few(
        self, configs: Sequence[ConfigT], gemm: GemmWorkload, device: Device, col_tiles: int
    ) -> ConfigT:
        """Return the configuration to run. configs: of blocks with so many column tiles of tokens,
        rows of tiles each, whose warps split K. Blocks of further tokens count as further rows."""
        group = _TOKENS * col_tiles
        rows = max(gemm.n, min(-(-gemm.m // group) * gemm.n, self.most_rows(group)))
        at = GemmWorkload(group, rows, gemm.k)
        return self.choose(configs, at, device, few_tokens_place, group)

    def most_rows(self, group: int) -> int:
        """Return the largest N of a group's cases, those of the similar kernel included."""
        own = max((gemm.n for gemm in self._table(group).cases), default=0)
        return max(own, self._like.most_rows(group) if self._like else 0)

    def _table(self, group: int) -> TimedCases:
        return self.tables.get(group, TimedCases((), (), (), np.empty((0, 0))))

    def _timed(self, group: int, gemm: GemmWorkload, device: Device) -> dict[str, float]:
        """Times of the configurations that were timed at this case, on this kind of GPU."""
        table = self._table(group)
        for row, (case, there) in enumerate(zip(table.cases, table.devices, strict=True)):
            near = math.isclose(there.memory_gbps, device.memory_gbps, rel_tol=_SAME_BANDWIDTH)
            if case == gemm and there.sms == device.sms and near:
                named = zip(table.configs, table.us[row].tolist(), strict=True)
                return {name: us for name, us in named if not math.isnan(us)}
        return {}

    def _log_us(
        self, config: Any, gemm: GemmWorkload, device: Device, place: PlaceOf, group: int
    ) -> float:
        here = place(config, gemm, device)
        points, logs, shapes = self._known(config, place, group)
        if self.is_blind:
            other = (shapes != (gemm.n, gemm.k)).any(axis=1)
            points, logs = points[other], logs[other]
        if len(logs) < _MIN_CASES:
            return math.inf if here.cost is None else here.cost
        near = _covariances(np.array([(*here.coordinates, 0.0)]), points)[0]
        nearest = np.argsort(-near)[:_NEAREST]
        among = _covariances(points[nearest], points[nearest]) + _NOISE * np.eye(len(nearest))
        mean = logs.mean()
        correction = mean + near[nearest] @ np.linalg.solve(among, logs[nearest] - mean)
        return float(correction) + (here.cost or 0.0)

    def _known(self, config: Any, place: PlaceOf, group: int) -> _Known:
        """The cases of this kernel, and those of the similar one at a distance."""
        key = (group, config, place)
        if key not in self._known_cases:
            parts = [self._own(config, place, group)]
            if self._like is not None:
                points, *rest = self._like._known(config, place, group)
                apart = np.eye(points.shape[1])[-1] * _SIMILAR
                parts.append(_Known(points + apart, *rest))
            filled = [part for part in parts if len(part.logs)] or parts[:1]
            self._known_cases[key] = _Known(*map(np.concatenate, zip(*filled, strict=True)))
        return self._known_cases[key]

    def _own(self, config: Any, place: PlaceOf, group: int) -> _Known:
        table, name = self._table(group), name_of(config)
        if name not in table.configs:
            return _Known(np.empty((0, 1)), np.empty(0), np.empty((0, 2)))
        us = table.us[:, table.configs.index(name)]
        timed = np.flatnonzero(~np.isnan(us))
        places = [place(config, table.cases[row], table.devices[row]) for row in timed]
        others = np.nanmean(np.log(table.us[timed]), axis=1)
        costs = [o if p.cost is None else p.cost for p, o in zip(places, others, strict=True)]
        return _Known(
            np.array([(*p.coordinates, 0.0) for p in places]),
            np.log(us[timed]) - np.array(costs),
            np.array([(table.cases[row].n, table.cases[row].k) for row in timed]),
        )


def few_tokens_place(config: Any, gemm: GemmWorkload, device: Device) -> Place:
    """Place of a configuration for few tokens: a block computes rows of tiles, its warps split K.

    In the tiled kernel, which competes at 17 to 32 tokens, warps share the rows instead.
    """
    row_warps, groups = getattr(config, "row_warps", None), getattr(config, "row_groups", 1)
    rows = config.row_tiles * (row_warps or groups)
    warps = config.k_split * (1 if row_warps else getattr(config, "warps", 1) // groups)
    tiles, steps = -(-gemm.n // _ROWS), gemm.k / _STEP_K
    per_sm = -(-tiles // rows) * config.k_split / device.sms
    per_warp = math.ceil(steps) / warps
    # The share of an SM that whole launches leave: grids of a third or two thirds of the SMs took
    # 20 to 30 % longer than slightly smaller ones (fp6-w6a16 at 32 tokens, H200).
    left = [at_once / per_sm % 1 if at_once >= per_sm else 0.0 for at_once in (1, 2)]
    return Place(
        None,
        (
            math.log(tiles / device.sms),
            math.log(steps) / 6,
            *(_imbalance(-(-tiles // of_block) / device.sms) / 1.6 for of_block in (1, 2, 4)),
            math.log(device.memory_gbps / device.sms) / 3,
            math.log(per_sm) / 2,
            *(_imbalance(per_sm / at_once) / 1.2 for at_once in (1, 2, 3)),  # blocks on an SM
            *(share / 2 for share in left),
            _imbalance(3 * per_sm) / 2,  # of the blocks of launches that overlap
            math.log(per_warp) / 3,
            _imbalance(per_warp) / 1.2,
        ),
    )


def _imbalance(mean: float) -> float:
    """Return the logarithm of the largest share over the mean, if shares are whole numbers."""
    return math.log(math.ceil(mean) / mean)


def _covariances(a: Floats, b: Floats) -> Floats:
    """Return the Matérn 3/2 covariances [points of a, points of b] of unit variance."""
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * a @ b.T
    distance = np.sqrt(3 * np.maximum(squares, 0.0))
    covariance: Floats = (1 + distance) * np.exp(-distance)
    return covariance


def name_of(config: Any) -> str:
    """Return a configuration's name in tables: settings at their default are left out, so that
    fields may be added."""
    values = ((field, getattr(config, field.name)) for field in fields(config))
    settings = ", ".join(f"{f.name}={value}" for f, value in values if value != f.default)
    return f"{type(config).__name__}({settings})"


def read_tables(text: str) -> dict[int, TimedCases]:
    """Parse tables by group.

    A part has the cases of one GPU, SMs and bandwidth in GB/s, where the same configurations were
    timed: their indices, and rows of M, N, K and times in thousandths.
    """
    tables = {}
    for group in json.loads(text):
        cases, devices, rows = [], [], []
        for part in group["parts"]:
            for m, n, k, *times in part["rows"]:
                row = np.full(len(group["configs"]), np.nan)
                row[part["configs"]] = np.array(times, dtype=np.float64) / PER_UNIT
                cases.append(GemmWorkload(m, n, k))
                devices.append(Device(*part["device"]))
                rows.append(row)
        configs = tuple(group["configs"])
        us = np.array(rows).reshape(-1, len(configs))
        tables[group["tokens"]] = TimedCases(configs, tuple(cases), tuple(devices), us)
    return tables
