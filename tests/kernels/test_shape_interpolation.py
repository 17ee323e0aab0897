"""Choice of a configuration for few tokens from timed shapes nearby."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.imma.configuration_choice import (
    ATOM,
    DUAL_GRAINED,
    FLEXQ,
    GROUP_SCALED,
    MAX_NATURAL,
    TWO_LEVEL,
)
from flexq_bench.kernels.cuda.imma.configurations import ImmaConfig, TiledConfig
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.cuda.shape_interpolation import (
    Interpolation,
    Losses,
    choose_by_timed_shapes,
    load_losses,
    read_losses,
    settings_of,
    write_losses,
)
from flexq_bench.kernels.cuda.weight_only.gemm import INT4_WEIGHTS, INT8_WEIGHTS, WeightOnlyConfig
from flexq_bench.kernels.cuda.weight_only.minifloat import FINE_MINIFLOATS, MINIFLOATS
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

KERNELS = {
    FLEXQ.timed: "flexq-imma-w6a6",
    ATOM.timed: "atom-w4a4",
    DUAL_GRAINED.timed: "dgq-w4a8",
    GROUP_SCALED.timed: "group-w4a8",
    MINIFLOATS: "fp6-w6a16",
    FINE_MINIFLOATS: "fp6-w6a16[fine]",
    INT8_WEIGHTS: "w8a16",
    INT4_WEIGHTS: "w4a16",
}
H100, H200 = Device(132, 3352), Device(132, 4917)
TABLES = [(timed, tiles) for timed in KERNELS for tiles in (1, 2, 4)]


@dataclass(frozen=True, slots=True)
class Tile(Config):
    row_tiles: int
    warps: int
    k_split: int
    col_tiles: int
    eager: int = 0


NARROW, WIDE = Tile(1, 8, 1, 1), Tile(2, 8, 1, 1)
SHAPES = tuple((n, k) for n in range(2048, 32768, 1024) for k in (4096, 8192))
# Narrow blocks are best where there are few rows, wide ones where there are many.
TABLE = Losses(
    (settings_of(NARROW), settings_of(WIDE)),
    SHAPES,
    (H200,) * len(SHAPES),
    np.array([[0.0, 0.1] if n < 12000 else [0.2, 0.0] for n, _ in SHAPES]),
)


def fastest(expected):
    return min(expected, key=expected.get)


def configs_of(timed, col_tiles):
    """As they are among the candidates of the kernel."""
    found = resolve(KERNELS[timed], "cuda")
    every = found.every_config() if isinstance(found, ImmaGemm) else found.configs(col_tiles)
    few_tokens = [c for c in every if isinstance(c, ImmaConfig | WeightOnlyConfig)]
    tiled = [c for c in every if isinstance(c, TiledConfig) and 8 * col_tiles == MAX_NATURAL]
    return [*(c for c in few_tokens if c.col_tiles == col_tiles), *tiled]


@pytest.mark.parametrize(("timed", "col_tiles"), TABLES)
def test_timed_shape_gets_nearly_its_fastest_configuration(timed, col_tiles):
    table = load_losses(timed)[col_tiles]
    configs = [c for c in configs_of(timed, col_tiles) if settings_of(c) in table.configs]
    lost = []
    for (n, k), device, row in zip(table.shapes, table.devices, table.lost, strict=True):
        chosen = choose_by_timed_shapes(configs, GemmWorkload(8 * col_tiles, n, k), device, timed)
        lost.append(row[table.configs.index(settings_of(chosen))])

    lost = [loss for loss in lost if not np.isnan(loss)]  # some shapes are older than some choices
    assert len(lost) >= 40
    assert np.mean(lost) < 0.01
    assert np.quantile(lost, 0.95) < 0.08


@pytest.mark.parametrize(("timed", "col_tiles"), TABLES)
def test_most_candidates_are_in_the_tables(timed, col_tiles):
    known = set(load_losses(timed)[col_tiles].configs)
    configs = configs_of(timed, col_tiles)

    assert sum(settings_of(c) in known for c in configs) > len(configs) / 2


@pytest.mark.parametrize("sms", [84, 108, 144])
@pytest.mark.parametrize(("timed", "col_tiles"), TABLES)
def test_equal_rows_per_sm_give_equal_configurations_on_other_gpus(timed, col_tiles, sms):
    table = load_losses(timed)[col_tiles]
    near = Interpolation(table)
    lost = []
    for (n, k), device, row in zip(table.shapes, table.devices, table.lost, strict=True):
        other = Device(sms, device.memory_gbps * sms / 132)
        expected = near.expected(16 * max(1, round(n * sms / 132 / 16)), k, other)
        there = [c for c, loss in zip(table.configs, row, strict=True) if not np.isnan(loss)]
        lost.append(row[table.configs.index(min(there, key=expected.get))])

    assert np.mean(lost) < 0.01


def test_near_shapes_say_what_a_configuration_loses():
    near = Interpolation(TABLE)

    assert near.expected(4200, 5000, H200)[settings_of(WIDE)] == pytest.approx(0.1, abs=0.03)
    assert fastest(near.expected(4200, 5000, H200)) == settings_of(NARROW)
    assert fastest(near.expected(28700, 5000, H200)) == settings_of(WIDE)


def test_predicted_time_steps_follow_blocks_and_warps():
    """An SM's blocks run one after another, and a block's warps all take as many steps as one."""
    drawn = random.Random(5)
    shapes = {(16 * drawn.randrange(64, 2000), 128 * drawn.randrange(8, 200)) for _ in range(80)}
    tiles = [Tile(rows, warps, 1, 1) for rows in (1, 2, 3, 5) for warps in (4, 8)]
    us = np.array([[wave_us(tile, *shape) for tile in tiles] for shape in sorted(shapes)])
    lost = us / us.min(axis=1, keepdims=True) - 1
    devices = (H200,) * len(shapes)
    near = Interpolation(
        Losses(tuple(map(settings_of, tiles)), tuple(sorted(shapes)), devices, lost)
    )

    expected = [near.expected(*shape, H200, unseen=True) for shape in sorted(shapes)]
    chosen = [[*losses].index(fastest(losses)) for losses in expected]
    assert min(lost.mean(axis=0)) > 0.1  # of the same configuration everywhere
    # With the coordinates of the shape alone it is 0.018.
    assert lost[np.arange(len(lost)), chosen].mean() < 0.01


def wave_us(tile, n, k):
    blocks = np.ceil(np.ceil(n / 16 / tile.row_tiles) / 132)
    steps = np.ceil(k / 128 / tile.warps) * tile.warps
    return 2 + 0.02 * blocks * steps * (tile.row_tiles + 0.5)


def test_untimed_configuration_at_timed_shape_is_predicted():
    lost = TABLE.lost.copy()
    lost[0, 1] = np.nan
    near = Interpolation(replace(TABLE, lost=lost))

    unseen = near.expected(*SHAPES[0], H200, unseen=True)
    assert unseen[settings_of(WIDE)] == pytest.approx(0.1, abs=0.03)


def test_fewer_sms_are_as_more_rows():
    near, half = Interpolation(TABLE), Device(66, H200.memory_gbps / 2)

    assert near.expected(14336, 8192, half) == pytest.approx(near.expected(28672, 8192, H200))
    assert fastest(near.expected(8192, 8192, half)) == settings_of(WIDE)


def test_unseen_shape_is_predicted_from_all_others():
    row = SHAPES.index((4096, 4096))
    lost = TABLE.lost.copy()
    lost[row] = [0.1, 0.0]  # what no neighbour tells
    odd = Interpolation(replace(TABLE, lost=lost))
    others = [i for i in range(len(SHAPES)) if i != row]
    without = replace(
        TABLE,
        shapes=tuple(SHAPES[i] for i in others),
        devices=TABLE.devices[1:],
        lost=TABLE.lost[others],
    )

    assert fastest(odd.expected(4096, 4096, H200)) == settings_of(WIDE)
    unseen = odd.expected(4096, 4096, H200, unseen=True)
    assert fastest(unseen) == settings_of(NARROW)
    exact = Interpolation(without).expected(4096, 4096, H200)
    assert unseen == pytest.approx(exact, abs=0.005)  # but for the mean


def test_rarely_timed_configuration_comes_last():
    lost = TABLE.lost.copy()
    lost[11:, 1] = np.nan
    sparse = Interpolation(replace(TABLE, lost=lost))

    assert fastest(sparse.expected(28672, 8192, H200)) == settings_of(NARROW)


def test_a_table_with_a_base_needs_few_shapes():
    """Wide blocks are 5 % slower here than in the base, whatever the shape."""
    few = slice(None, None, 5)
    lost = TABLE.lost[few] + [0.0, 0.05]
    own = Interpolation(
        replace(TABLE, shapes=SHAPES[few], devices=TABLE.devices[few], lost=lost),
        Interpolation(replace(TABLE, lost=TABLE.lost)),
    )
    expected = own.expected(9000, 6000, H200)

    assert expected[settings_of(NARROW)] == pytest.approx(0.0, abs=0.02)
    assert expected[settings_of(WIDE)] == pytest.approx(0.15, abs=0.03)


def test_missing_column_tiles_come_from_the_base_table():
    configs = [c for c in FLEXQ.for_few(24, 4096) if c.k_split == 1]
    gemm = GemmWorkload(24, 4096, 4096)

    chosen = choose_by_timed_shapes(configs, gemm, H200, TWO_LEVEL.timed)

    assert chosen == choose_by_timed_shapes(configs, gemm, H200, FLEXQ.timed)


def test_default_fields_are_left_out_of_settings():
    settings = (("row_tiles", 1), ("warps", 8), ("k_split", 1), ("col_tiles", 1))
    assert settings_of(NARROW) == settings
    assert settings_of(replace(NARROW, eager=1)) == (*settings, ("eager", 1))


def test_tables_are_read_as_they_were_written():
    lost = np.array([[0.0, np.nan], [0.123, 0.0], [0.2, 0.0]])
    sparse = replace(TABLE, shapes=SHAPES[:3], devices=(H200, H200, H100), lost=lost)

    text = write_losses({1: TABLE, 2: sparse})

    assert [len(part["parts"]) for part in json.loads(text)] == [1, 2]
    for found, written in zip(read_losses(text).values(), (TABLE, sparse), strict=True):
        assert replace(found, lost=None) == replace(written, lost=None)
        np.testing.assert_allclose(found.lost, written.lost)
