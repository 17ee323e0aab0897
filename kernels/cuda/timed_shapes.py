"""Choice of a configuration for few tokens by interpolation between timed shapes.

The kernels for few tokens share a structure: a block computes rows of tiles, its warps split K. The
loss of a configuration against the fastest one depends on the row tiles per SM, the steps of K, and
the imbalance of blocks over the SMs. It is interpolated between timed shapes in these coordinates
by a Gaussian process with a Matérn 3/2 covariance (Rasmussen and Williams 2006, sections 2.2 and
4.2.1).

Tables are in the folder timed_shapes of an engine. `python benchmarks/kernels/heuristic.py` times
random shapes, writes the tables, and reports the loss of the choice on shapes that are in none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from workloads.gemm import GemmWorkload

_STEP_K, _ROWS, _TOKENS = 128, 16, 8  # of a tile
# Length scales of losses: in the logarithms of row tiles per SM, of steps of K, and of the blocks
# of the busiest SM over the mean, by row tiles of a block. Tuned by hand together with the noise
# for the least mean leave-one-out loss over all tables.
_TILES_SCALE, _STEPS_SCALE, _IMBALANCE_SCALE = 0.4, 3.0, 0.8
_ROW_TILES = (1, 2, 4)
_NOISE = 0.06  # variance of a time over that of losses
_MAX_LOSS = 0.3  # larger losses are clipped to it
_MIN_SHAPES = 12  # timed shapes that a configuration needs
_NEWLINE = ",\n"

Floats = NDArray[np.float64]
Settings = tuple[tuple[str, Any], ...]


class FewConfig(Protocol):
    """Interface of ImmaConfig and WeightOnlyConfig."""

    @property
    def col_tiles(self) -> int: ...


ConfigT = TypeVar("ConfigT", bound=FewConfig)


@dataclass(frozen=True, slots=True)
class TimedShapes:
    """A table of timed shapes. engine: its folder in kernels/cuda. name: its file there.

    base: table of a similar kernel in the same folder. Only the difference from what it predicts is
    interpolated, which takes fewer shapes.
    """

    engine: str
    name: str
    base: str = ""

    @property
    def file(self) -> Traversable:
        folder = resources.files("kernels") / "cuda" / self.engine / "timed_shapes"
        return folder / f"{self.name}.json"


@dataclass(frozen=True, slots=True)
class Losses:
    """Measured losses of configurations with the same column tiles at timed shapes.

    configs: as returned by settings_of. shapes: (N, K). sms: SMs of the GPU. lost: [shapes,
    configs], time divided by the fastest configuration's, minus 1; NaN: not timed.
    """

    configs: tuple[Settings, ...]
    shapes: tuple[tuple[int, int], ...]
    sms: int
    lost: Floats


class Interpolation:
    """Gaussian process regression of losses from a table, or of their differences from `base`."""

    def __init__(self, table: Losses, base: Interpolation | None = None) -> None:
        self._table, self._base = table, base
        self._points = np.array([_coordinates(*shape, table.sms) for shape in table.shapes])
        self._rows = {shape: row for row, shape in enumerate(table.shapes)}
        covariance = _covariance(self._points, self._points) + _NOISE * np.eye(len(self._points))
        known = ~np.isnan(table.lost)
        prior = [self._prior(*shape, table.sms, unseen=True) for shape in table.shapes]
        lost = np.minimum(table.lost, _MAX_LOSS) - prior
        self._means = np.full(len(table.configs), np.inf)
        self._weights = np.zeros_like(lost)
        self._left_out = np.full_like(lost, np.inf)  # leave-one-out predictions
        for mask in {column.tobytes(): column for column in known.T}.values():
            columns = np.flatnonzero((mask == known.T).all(axis=1))
            if mask.sum() < _MIN_SHAPES:
                continue
            inverse = np.linalg.inv(covariance[np.ix_(mask, mask)])
            losses = lost[np.ix_(mask, columns)]
            self._means[columns] = losses.mean(axis=0)
            weights = inverse @ (losses - losses.mean(axis=0))
            self._weights[np.ix_(mask, columns)] = weights
            left_out = losses - weights / np.diag(inverse)[:, None]
            self._left_out[np.ix_(mask, columns)] = left_out

    def expected(self, n: int, k: int, sms: int, *, unseen: bool = False) -> dict[Settings, float]:
        """Return the expected loss of each configuration at a shape on a GPU with `sms` SMs.

        unseen: predict as if the shape had not been timed. Infinity: too few shapes were timed.
        """
        row = self._rows.get((n, k)) if unseen and sms == self._table.sms else None
        if row is None:
            covariances = _covariance(_coordinates(n, k, sms)[None], self._points)[0]
            losses = self._means + covariances @ self._weights
        else:
            losses = self._left_out[row]
        losses = losses + self._prior(n, k, sms, unseen=unseen)
        return dict(zip(self._table.configs, losses.tolist(), strict=True))

    def _prior(self, n: int, k: int, sms: int, *, unseen: bool) -> Floats:
        """Return what `base` expects of this table's configurations; 0 where it knows nothing."""
        known = {} if self._base is None else self._base.expected(n, k, sms, unseen=unseen)
        losses = np.array([known.get(config, 0.0) for config in self._table.configs])
        return np.where(np.isfinite(losses), losses, 0.0)

    @property
    def most_rows(self) -> int:
        """The largest N of the timed shapes."""
        return max((n for n, _ in self._table.shapes), default=0)


def settings_of(config: object) -> Settings:
    """Return the fields of a configuration that differ from their defaults."""
    values = ((field, getattr(config, field.name)) for field in fields(config))  # type: ignore[arg-type]
    return tuple((field.name, value) for field, value in values if value != field.default)


def choose_by_timed_shapes(
    configs: Sequence[ConfigT],
    gemm: GemmWorkload,
    sms: int,
    timed: TimedShapes,
    *,
    unseen: bool = False,
) -> ConfigT:
    """Return the configuration with the least expected loss; untimed ones come last.

    configs: with the same column tiles. unseen: as of Interpolation.expected.
    """
    col_tiles = configs[0].col_tiles
    token_blocks = -(-gemm.m // (_TOKENS * col_tiles))
    expected = _expected(timed, col_tiles, token_blocks, gemm.n, gemm.k, sms, unseen)
    return min(configs, key=lambda config: expected.get(settings_of(config), math.inf))


@lru_cache(maxsize=4096)
def _expected(
    timed: TimedShapes, col_tiles: int, token_blocks: int, n: int, k: int, sms: int, unseen: bool
) -> Mapping[Settings, float]:
    # Several blocks of tokens have as many thread blocks as one block of tokens with more rows.
    # The number of rows is clipped to the largest timed one.
    interpolation = _interpolation(timed, col_tiles)
    rows = max(n, min(token_blocks * n, interpolation.most_rows))
    return interpolation.expected(rows, k, sms, unseen=unseen)


@cache
def _interpolation(timed: TimedShapes, col_tiles: int) -> Interpolation:
    base = _interpolation(TimedShapes(timed.engine, timed.base), col_tiles) if timed.base else None
    tables = load_losses(timed)
    if base is not None and col_tiles not in tables:
        return base
    return Interpolation(tables[col_tiles], base)


@cache
def load_losses(timed: TimedShapes) -> Mapping[int, Losses]:
    """Load the tables of a kernel, by column tiles."""
    return read_losses(timed.file.read_text())


def read_losses(text: str) -> dict[int, Losses]:
    """Parse the tables that write_losses formatted."""
    tables = {}
    for part in json.loads(text):
        rows = part["rows"]
        lost = np.array([row[2:] for row in rows], dtype=np.float64) / 1000
        tables[int(part["col_tiles"])] = Losses(
            tuple(tuple(config.items()) for config in part["configs"]),
            tuple((row[0], row[1]) for row in rows),
            part["sms"],
            lost,
        )
    return tables


def write_losses(tables: Mapping[int, Losses]) -> str:
    """Format tables as JSON.

    A row has N, K and the losses in thousandths; null: not timed.
    """
    parts = []
    for col_tiles, table in tables.items():
        rows = [
            json.dumps([*shape, *(None if math.isnan(x) else round(1000 * x) for x in lost)])
            for shape, lost in zip(table.shapes, table.lost.tolist(), strict=True)
        ]
        configs = [json.dumps(dict(config)) for config in table.configs]
        lists = f'"configs": [\n{_NEWLINE.join(configs)}\n], "rows": [\n{_NEWLINE.join(rows)}\n]'
        parts.append(f'{{"col_tiles": {col_tiles}, "sms": {table.sms}, {lists}}}')
    return f"[{', '.join(parts)}]\n"


@lru_cache(maxsize=4096)
def _coordinates(n: int, k: int, sms: int) -> Floats:
    """Return the coordinates of a shape, in units of the length scales."""
    tiles, steps = -(-n // _ROWS), k / _STEP_K
    imbalance = []
    for row_tiles in _ROW_TILES:
        blocks_per_sm = -(-tiles // row_tiles) / sms
        imbalance.append(math.log(math.ceil(blocks_per_sm) / blocks_per_sm) / _IMBALANCE_SCALE)
    return np.array(
        [math.log(tiles / sms) / _TILES_SCALE, math.log(steps) / _STEPS_SCALE, *imbalance]
    )


def _covariance(a: Floats, b: Floats) -> Floats:
    distance = np.sqrt(3 * ((a[:, None] - b[None]) ** 2).sum(axis=2))
    covariance: Floats = (1 + distance) * np.exp(-distance)
    return covariance
