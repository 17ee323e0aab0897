"""Which configuration of a kernel for few tokens to run where nothing was timed.

These kernels share a structure: blocks own rows of tiles, their warps share out K. What a
configuration loses against the fastest one follows from how many row tiles an SM has, how many
steps of K a block takes, and how unevenly blocks of so many row tiles fall on the SMs. So it is
taken from shapes that were timed, as the mean over those that are near in these terms.

`python benchmarks/kernels/heuristic.py` times random shapes, writes the tables of
kernels/cuda/few_times, and says what the choice loses on shapes that it hasn't seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from workloads.gemm import GemmWorkload

_STEP_K, _ROWS = 128, 16  # of a tile
# Distances at which a timed shape counts e^-1/2 of the nearest one: in the logarithms of row tiles
# an SM, of steps of K, and of the busiest SM's share over the mean, by row tiles of a block.
_TILES_SCALE, _STEPS_SCALE, _UNEVEN_SCALE = 0.2, 0.7, 0.12
_ROW_TILES = (1, 2, 3, 4)
_WORST = 0.3  # a loss of more than this says no more than this does
_LINES = ",\n"
_COUNTS = 1e-6  # configurations that no near shape was timed with have less weight

Floats = NDArray[np.float64]
Settings = tuple[tuple[str, Any], ...]


class FewConfig(Protocol):
    """What ImmaConfig and WeightOnlyConfig have in common."""

    @property
    def col_tiles(self) -> int: ...


Choosable = TypeVar("Choosable", bound=FewConfig)


@dataclass(frozen=True, slots=True)
class Few:
    """A kernel for few tokens. table: its file in kernels/cuda/few_times, without the ending.

    many_rows: row tiles an SM; from here on, 17 to 32 tokens are faster in the kernel for many, if
    there is one.
    """

    table: str
    many_rows: float = 4.0


@dataclass(frozen=True, slots=True)
class Losses:
    """What configurations with the same column tiles lost at shapes that were timed.

    configs: as settings_of has them. shapes: (N, K). sms: of the GPU. lost: [shapes, configs], time
    over the fastest one's, less 1; NaN: not timed.
    """

    configs: tuple[Settings, ...]
    shapes: tuple[tuple[int, int], ...]
    sms: int
    lost: Floats

    def expected(self, n: int, k: int, sms: int, *, unseen: bool = False) -> dict[Settings, float]:
        """What each configuration should lose at a shape on a GPU of so many SMs.

        unseen: as if the shape itself had not been timed.
        """
        places = np.array([_place(*shape, self.sms) for shape in self.shapes])
        apart = ((places - _place(n, k, sms)) ** 2).sum(axis=1)
        if unseen:
            apart[[shape == (n, k) for shape in self.shapes]] = np.inf
        near = np.exp((apart.min() - apart) / 2)
        timed = ~np.isnan(self.lost)
        weight = near @ timed
        total = near @ np.where(timed, np.minimum(self.lost, _WORST), 0.0)
        mean = np.where(weight > _COUNTS, total / np.maximum(weight, _COUNTS), np.inf)
        return dict(zip(self.configs, mean.tolist(), strict=True))


def settings_of(config: object) -> Settings:
    """Its fields but those that have their default: what tells a configuration from others."""
    values = ((field, getattr(config, field.name)) for field in fields(config))  # type: ignore[arg-type]
    return tuple((field.name, value) for field, value in values if value != field.default)


def choose_few(
    configs: Sequence[Choosable], gemm: GemmWorkload, sms: int, few: Few, *, unseen: bool = False
) -> Choosable:
    """The configuration that should lose least; one that was never timed comes last.

    configs: with the same column tiles. unseen: as of Losses.expected.
    """
    expected = _expected(few.table, configs[0].col_tiles, gemm.n, gemm.k, sms, unseen)
    return min(configs, key=lambda config: expected.get(settings_of(config), math.inf))


@lru_cache(maxsize=4096)
def _expected(
    table: str, col_tiles: int, n: int, k: int, sms: int, unseen: bool
) -> Mapping[Settings, float]:
    return load_losses(table)[col_tiles].expected(n, k, sms, unseen=unseen)


@cache
def load_losses(table: str) -> Mapping[int, Losses]:
    """The tables of a kernel by column tiles."""
    folder = resources.files("kernels") / "cuda" / "few_times"
    return read_losses((folder / f"{table}.json").read_text())


def read_losses(text: str) -> dict[int, Losses]:
    """What write_losses wrote."""
    found = {}
    for part in json.loads(text):
        rows = part["rows"]
        lost = np.array([row[2:] for row in rows], dtype=np.float64) / 1000
        found[int(part["col_tiles"])] = Losses(
            tuple(tuple(config.items()) for config in part["configs"]),
            tuple((row[0], row[1]) for row in rows),
            part["sms"],
            lost,
        )
    return found


def write_losses(tables: Mapping[int, Losses]) -> str:
    """As JSON: of each row N, K and the losses in thousandths, null where nothing was timed."""
    parts = []
    for col_tiles, table in tables.items():
        rows = [
            json.dumps([*shape, *(None if math.isnan(x) else round(1000 * x) for x in lost)])
            for shape, lost in zip(table.shapes, table.lost.tolist(), strict=True)
        ]
        configs = [json.dumps(dict(config)) for config in table.configs]
        lists = f'"configs": [\n{_LINES.join(configs)}\n], "rows": [\n{_LINES.join(rows)}\n]'
        parts.append(f'{{"col_tiles": {col_tiles}, "sms": {table.sms}, {lists}}}')
    return f"[{', '.join(parts)}]\n"


@lru_cache(maxsize=4096)
def _place(n: int, k: int, sms: int) -> Floats:
    """Where a shape lies, in units of the scales."""
    tiles, steps = -(-n // _ROWS), k / _STEP_K
    uneven = []
    for row_tiles in _ROW_TILES:
        blocks_an_sm = -(-tiles // row_tiles) / sms
        uneven.append(math.log(math.ceil(blocks_an_sm) / blocks_an_sm) / _UNEVEN_SCALE)
    return np.array([math.log(tiles / sms) / _TILES_SCALE, math.log(steps) / _STEPS_SCALE, *uneven])


# Of flexq-imma; of 4-bit weights whose groups are scaled one by one; of dgq, whose sums stay
# integers; of fp6 and fp5.
FLEXQ = Few("flexq")
NIBBLES = Few("nibbles", many_rows=6.0)
DUAL_GRAINED = Few("dual-grained", many_rows=10.0)
MINIFLOATS = Few("minifloats")
