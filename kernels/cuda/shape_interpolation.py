"""Choice of a configuration for few tokens by interpolation between timed shapes.

Where nothing was tuned, `choose_by_timed_shapes` is called by the `default_config` of the
weight-only kernels (weight_only/gemm.py) and, for csrc/imma, by imma/configuration_choice.py.

The kernels for few tokens share a structure: a block computes rows of tiles, its warps split K. In
the tiled kernel, which competes with them at 17 to 32 tokens, warps share the rows instead. The
logarithm of a configuration's time, relative to the mean over all configurations at the shape, is
interpolated between timed shapes by a Gaussian process with a mean of its own (Rasmussen and
Williams 2006, sections 2.2 and 4.2.1). Its covariance is a sum of three Matérn 3/2 covariances
over coordinates of

- the shape: row tiles per SM, steps of K, and the imbalance of blocks over the SMs;
- the configuration's own blocks: blocks per SM, their imbalance, and how those of consecutive
  launches, which overlap, fit next to each other;
- its own warps: steps of K per warp, and the imbalance of steps over the warps;

each with the bandwidth of the memory per SM, because tables have shapes of an H100 and of an H200.
The last two say where a configuration alone becomes slower, because one more block or step begins.

Tables are in the folder timed_shapes of an engine. `python benchmarks/kernels/heuristic.py` times
random shapes, writes the tables, and reports the loss of the choice on shapes that are in none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

_STEP_K, _ROWS, _TOKENS = 128, 16, 8  # of a tile
# Length scales of the coordinates, all logarithms, and weights. Set by hand; with each of them two
# thirds or one and a half times as large, the mean leave-one-out loss over all tables is 0.81 to
# 0.86 %.
_TILES_SCALE, _STEPS_SCALE, _SHAPE_IMBALANCE_SCALE = 0.5, 3.0, 0.8  # of the shape
_ROW_TILES = (1, 2, 4)  # of blocks whose imbalance is a coordinate of the shape
_BLOCKS_SCALE, _WARP_STEPS_SCALE, _IMBALANCE_SCALE = 1.0, 1.5, 0.6  # of a configuration
_BANDWIDTH_SCALE = 1.5  # of a GPU
_AT_ONCE = (1, 2, 3)  # blocks that an SM may run at once: what its own imbalance is counted for
# Grids of 44 or 88 blocks, a third or two thirds of 132 SMs, took 20 to 30 % longer than grids of
# 41 or 92 in comparison with other configurations (fp6-w6a16 at 32 tokens, H200).
_REMAINDER_AT_ONCE = (1, 2)  # blocks that an SM may run at once, for the share of a launch that
# fits next to whole launches
_LAUNCHES = 3  # overlapping: what the imbalance of their blocks together is counted for
# Variance of each part over that of the first, and of a time's noise.
_BLOCKS_WEIGHT, _WARPS_WEIGHT, _NOISE = 0.5, 0.3, 0.06
_MIN_SHAPES = 12  # timed shapes that a configuration needs

Floats = NDArray[np.float64]
Settings = tuple[tuple[str, Any], ...]
Parts = tuple[Floats, Floats, Floats]  # of the shape [1, ...], of kinds of blocks and of warps


class FewConfig(Protocol):
    """Interface of ImmaConfig, WeightOnlyConfig and TiledConfig."""

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
        folder = resources.files(f"flexq_bench.kernels.cuda.{self.engine}") / "timed_shapes"
        return folder / f"{self.name}.json"


@dataclass(frozen=True, slots=True)
class Losses:
    """Measured losses of configurations at timed shapes, with as many tokens as fit some column
    tiles.

    configs: as returned by settings_of. shapes: (N, K). devices: the GPU of each shape. lost:
    [shapes, configs], time divided by the fastest configuration's, minus 1; NaN: not timed.
    """

    configs: tuple[Settings, ...]
    shapes: tuple[tuple[int, int], ...]
    devices: tuple[Device, ...]
    lost: Floats


class Interpolation:
    """Gaussian process regression of times from a table, or of their differences from `base`.

    Times are logarithms, relative to the mean over the configurations that were timed at a shape.
    """

    def __init__(self, table: Losses, base: Interpolation | None = None) -> None:
        self._table, self._base = table, base
        places = [*zip(table.shapes, table.devices, strict=True)]
        self._rows = {(*shape, device.sms): row for row, (shape, device) in enumerate(places)}
        known = ~np.isnan(table.lost)
        known &= known.sum(axis=0) >= _MIN_SHAPES
        prior = [self._prior(*shape, device, unseen=True) for shape, device in places]
        times = np.where(known, np.log1p(table.lost) - prior, 0.0)
        timed = np.maximum(known.sum(axis=1, keepdims=True), 1)
        times -= times.sum(axis=1, keepdims=True) / timed
        self._kinds = _Kinds([dict(config) for config in table.configs])
        self._points = self._kinds.coordinates(table.shapes, table.devices)
        covariances = _covariances(self._points, self._points)
        self._means = np.full(len(table.configs), np.inf)
        self._weights = np.zeros_like(times)
        self._left_out = np.full_like(times, np.inf)  # predictions from all other shapes
        alike: dict[tuple[int, int, bytes], list[int]] = {}  # columns with one covariance
        for column in np.flatnonzero(known.any(axis=0)).tolist():
            kind = int(self._kinds.of_blocks[column]), int(self._kinds.of_warps[column])
            alike.setdefault((*kind, known[:, column].tobytes()), []).append(column)
        for (blocks, warps, _), group in alike.items():
            mask, columns = known[:, group[0]], np.array(group)
            covariance = _weighted(covariances, blocks, warps)[:, mask]
            inverse = np.linalg.inv(covariance[mask] + _NOISE * np.eye(mask.sum()))
            own = times[np.ix_(mask, columns)]
            self._means[columns] = own.mean(axis=0)
            weights = inverse @ (own - own.mean(axis=0))
            self._weights[np.ix_(mask, columns)] = weights
            left_out = own.mean(axis=0) + covariance @ weights
            left_out[mask] = own - weights / np.diag(inverse)[:, None]
            self._left_out[:, columns] = left_out

    def expected(
        self, n: int, k: int, device: Device, *, unseen: bool = False
    ) -> dict[Settings, float]:
        """Return the expected loss of each configuration at a shape on a GPU.

        unseen: predict as if the shape had not been timed. Infinity: too few shapes were timed.
        """
        times = self._times(n, k, device, unseen=unseen)
        fastest = times.min()
        losses = np.expm1(times - fastest) if math.isfinite(fastest) else times
        return dict(zip(self._table.configs, losses.tolist(), strict=True))

    def _times(self, n: int, k: int, device: Device, *, unseen: bool) -> Floats:
        row = self._rows.get((n, k, device.sms)) if unseen else None
        if row is None:
            point = self._kinds.coordinates([(n, k)], [device])
            kinds = self._kinds.of_blocks, self._kinds.of_warps
            covariances = _weighted(_covariances(point, self._points), *kinds)[:, 0]
            own: Floats = self._means + (covariances * self._weights.T).sum(axis=1)
        else:
            own = self._left_out[row]
        return own + self._prior(n, k, device, unseen=unseen)

    def _prior(self, n: int, k: int, device: Device, *, unseen: bool) -> Floats:
        """Return what `base` predicts of this table's configurations; 0 where it knows nothing."""
        if self._base is None:
            return np.zeros(len(self._table.configs))
        times = self._base._times(n, k, device, unseen=unseen)
        known = dict(zip(self._base._table.configs, times.tolist(), strict=True))
        prior = np.array([known.get(config, 0.0) for config in self._table.configs])
        return np.where(np.isfinite(prior), prior, 0.0)

    @property
    def most_rows(self) -> int:
        """Return the largest N of the timed shapes."""
        return max((n for n, _ in self._table.shapes), default=0)


def settings_of(config: object) -> Settings:
    """Return the fields of a configuration that differ from their defaults."""
    values = ((field, getattr(config, field.name)) for field in fields(config))  # type: ignore[arg-type]
    return tuple((field.name, value) for field, value in values if value != field.default)


def choose_by_timed_shapes(
    configs: Sequence[ConfigT],
    gemm: GemmWorkload,
    device: Device,
    timed: TimedShapes,
    *,
    unseen: bool = False,
) -> ConfigT:
    """Return the configuration with the least expected loss; untimed configurations come last.

    configs: those for few tokens first, with the same column tiles. unseen: as of
    Interpolation.expected.
    """
    col_tiles = configs[0].col_tiles
    token_blocks = -(-gemm.m // (_TOKENS * col_tiles))
    expected = _expected(timed, col_tiles, token_blocks, gemm.n, gemm.k, device, unseen)
    return min(configs, key=lambda config: expected.get(settings_of(config), math.inf))


@lru_cache(maxsize=4096)
def _expected(
    timed: TimedShapes,
    col_tiles: int,
    token_blocks: int,
    n: int,
    k: int,
    device: Device,
    unseen: bool,
) -> Mapping[Settings, float]:
    # Several blocks of tokens have as many thread blocks as one block of tokens with more rows.
    # The number of rows is clipped to the largest timed one.
    interpolation = _interpolation(timed, col_tiles)
    rows = max(n, min(token_blocks * n, interpolation.most_rows))
    return interpolation.expected(rows, k, device, unseen=unseen)


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
        rows = [(Device(*of["device"]), row) for of in part["parts"] for row in of["rows"]]
        lost = np.array([row[2:] for _, row in rows], dtype=np.float64) / 1000
        tables[int(part["col_tiles"])] = Losses(
            tuple(tuple(config.items()) for config in part["configs"]),
            tuple((row[0], row[1]) for _, row in rows),
            tuple(device for device, _ in rows),
            lost,
        )
    return tables


def write_losses(tables: Mapping[int, Losses]) -> str:
    """Format tables as JSON.

    A part has the shapes of one GPU, SMs and bandwidth in GB/s. A row has N, K and the losses in
    thousandths; null: not timed.
    """
    formatted = []
    for col_tiles, table in tables.items():
        parts: dict[Device, list[Sequence[int | None]]] = {}
        for shape, device, lost in zip(
            table.shapes, table.devices, table.lost.tolist(), strict=True
        ):
            thousandths = (None if math.isnan(x) else round(1000 * x) for x in lost)
            parts.setdefault(device, []).append([*shape, *thousandths])
        of_devices = (
            f'{{"device": {json.dumps(device)}, "rows": {json_rows(rows)}}}'
            for device, rows in parts.items()
        )
        configs = json_rows(map(dict, table.configs))
        lists = f'"configs": {configs}, "parts": [{", ".join(of_devices)}]'
        formatted.append(f'{{"col_tiles": {col_tiles}, {lists}}}')
    return f"[{', '.join(formatted)}]\n"


def json_rows(rows: Iterable[Any]) -> str:
    """Format rows as a JSON list with a line for each."""
    lines = ",\n".join(map(json.dumps, rows))
    return f"[\n{lines}\n]"


class _Kinds:
    """Kinds of blocks and of warps of configurations, and the coordinates of shapes with each.

    of_blocks, of_warps: the index of each configuration's kind.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]]) -> None:
        # The warps of a TiledConfig share rows, and don't split K.
        rows = [c["row_tiles"] * c.get("row_warps", 1) for c in configs]
        blocks = np.array([(row, c["k_split"]) for row, c in zip(rows, configs, strict=True)])
        warps = np.array([c.get("warps", 1) * c["k_split"] for c in configs])
        self._blocks, of_blocks = np.unique(blocks, axis=0, return_inverse=True)
        self._warps, of_warps = np.unique(warps, return_inverse=True)
        self.of_blocks, self.of_warps = of_blocks.ravel(), of_warps.ravel()

    def coordinates(self, shapes: Sequence[tuple[int, int]], devices: Sequence[Device]) -> Parts:
        """Return the coordinates of shapes, N and K, on GPUs, in units of the length scales."""
        n, k = np.array(shapes).reshape(-1, 2).T
        sms, memory_gbps = np.array(devices).reshape(-1, 2).T
        bandwidth = np.log(memory_gbps / sms) / _BANDWIDTH_SCALE
        tiles, steps = -(-n // _ROWS), k / _STEP_K
        imbalances = [_imbalance(-(-tiles // of_block) / sms) for of_block in _ROW_TILES]
        row_tiles, k_split = self._blocks.T[:, :, None]
        per_sm = -(-tiles // row_tiles) * k_split / sms
        own_imbalances = [_imbalance(per_sm / at_once) for at_once in _AT_ONCE]
        launches = [at_once / per_sm for at_once in _REMAINDER_AT_ONCE]
        remainders = [np.where(fit >= 1, fit % 1, 0.0) for fit in launches]
        per_warp = np.ceil(steps) / self._warps[:, None]
        return (
            _stacked(
                np.log(tiles / sms) / _TILES_SCALE,
                np.log(steps) / _STEPS_SCALE,
                *(imbalance / _SHAPE_IMBALANCE_SCALE for imbalance in imbalances),
                bandwidth,
            )[None],
            _stacked(
                np.log(per_sm) / _BLOCKS_SCALE,
                *(imbalance / _IMBALANCE_SCALE for imbalance in own_imbalances),
                *remainders,
                _imbalance(_LAUNCHES * per_sm),
                bandwidth,
            ),
            _stacked(
                np.log(per_warp) / _WARP_STEPS_SCALE,
                _imbalance(per_warp) / _IMBALANCE_SCALE,
                bandwidth,
            ),
        )


def _stacked(*coordinates: Floats) -> Floats:
    return np.stack(np.broadcast_arrays(*coordinates), axis=-1)


def _imbalance(mean: Floats) -> Floats:
    """Return the logarithm of the largest share over the mean, if shares are whole numbers."""
    imbalance: Floats = np.log(np.ceil(mean) / mean)
    return imbalance


def _covariances(a: Parts, b: Parts) -> Parts:
    """Return the covariances [kinds, shapes of a, shapes of b] of each part."""
    shape, blocks, warps = map(matern, a, b)
    return shape, blocks, warps


def _weighted(covariances: Parts, blocks: Any, warps: Any) -> Floats:
    """Return the covariance of the configurations with these kinds."""
    of_shape, of_blocks, of_warps = covariances
    own = _BLOCKS_WEIGHT * of_blocks[blocks] + _WARPS_WEIGHT * of_warps[warps]
    covariance: Floats = of_shape[0] + own
    return covariance


def matern(a: Floats, b: Floats) -> Floats:
    """Return the Matérn 3/2 covariances [..., points of a, points of b] of unit variance.

    a, b: [..., points, coordinates], in units of the length scales.
    """
    squares = (a * a).sum(axis=-1)[..., :, None] + (b * b).sum(axis=-1)[..., None, :]
    squares = np.maximum(squares - 2 * a @ b.swapaxes(-1, -2), 0.0)  # of the distances
    distance = np.sqrt(3 * squares)
    covariance: Floats = (1 + distance) * np.exp(-distance)
    return covariance
