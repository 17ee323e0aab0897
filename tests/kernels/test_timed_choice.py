"""Choice of a configuration from timed cases nearby."""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.imma.configuration_choice import (
    ATOM,
    DUAL_GRAINED,
    FLEXQ,
    GROUP_SCALED,
    TWO_LEVEL,
)
from flexq_bench.kernels.cuda.imma.configurations import ClusterConfig, ImmaConfig, TiledConfig
from flexq_bench.kernels.cuda.timed_choice import (
    MANY_TOKENS,
    Place,
    TimedCases,
    TimedChoice,
    few_tokens_place,
    name_of,
    read_tables,
)
from flexq_bench.kernels.cuda.weight_only.gemm import INT4_WEIGHTS, INT8_WEIGHTS
from flexq_bench.kernels.cuda.weight_only.minifloat import FINE_MINIFLOATS, MINIFLOATS
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

H100, H200 = Device(132, 3352), Device(132, 4917)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "kernels"
IMMA = {"flexq": FLEXQ, "atom": ATOM, "group": GROUP_SCALED, "dgq": DUAL_GRAINED, "dual": TWO_LEVEL}
WEIGHT_ONLY = {
    "fp6-w6a16": MINIFLOATS,
    "fp6-w6a16[fine]": FINE_MINIFLOATS,
    "w8a16": INT8_WEIGHTS,
    "w4a16": INT4_WEIGHTS,
}
TIMED = [*(candidates.timed for candidates in IMMA.values()), *WEIGHT_ONLY.values()]


@dataclass(frozen=True, slots=True)
class Tile(Config):
    row_tiles: int
    warps: int
    k_split: int
    col_tiles: int
    eager: int = 0


class Stored(TimedChoice):
    """Of tables in memory."""

    def __init__(self, tables, like=None):
        super().__init__("stored", like)
        self.tables = tables


NARROW, WIDE = Tile(1, 8, 1, 1), Tile(2, 8, 1, 1)
SHAPES = tuple((n, k) for n in range(2048, 32768, 1024) for k in (4096, 8192))
# Narrow blocks are best where there are few rows, wide ones where there are many.
TABLE = TimedCases(
    (name_of(NARROW), name_of(WIDE)),
    tuple(GemmWorkload(8, *shape) for shape in SHAPES),
    (H200,) * len(SHAPES),
    np.array([[1.0, 1.1] if n < 12000 else [1.2, 1.0] for n, _ in SHAPES]),
)


def chosen(timed, n, k, device=H200, configs=(NARROW, WIDE), *, blind=False):
    timed.is_blind = blind
    return timed.choose_few(configs, GemmWorkload(8, n, k), device, 1)


def without(table, gone):
    kept = [i for i, case in enumerate(table.cases) if (case.n, case.k) != gone]
    cases, devices = (tuple(part[i] for i in kept) for part in (table.cases, table.devices))
    return replace(table, cases=cases, devices=devices, us=table.us[kept])


def test_near_shapes_decide_where_nothing_was_timed():
    timed = Stored({8: TABLE})

    assert chosen(timed, 4200, 5000) == NARROW
    assert chosen(timed, 28700, 5000) == WIDE


def test_fewer_sms_are_as_more_rows():
    half = Device(66, H200.memory_gbps / 2)

    assert chosen(Stored({8: TABLE}), 8192, 5000) == NARROW
    assert chosen(Stored({8: TABLE}), 8192, 5000, half) == WIDE


def test_timed_case_gets_its_fastest_configuration_there():
    us = TABLE.us.copy()
    us[SHAPES.index((4096, 4096))] = [1.1, 1.0]  # what no neighbour tells
    odd = Stored({8: replace(TABLE, us=us)})

    assert chosen(odd, 4096, 4096) == WIDE
    assert chosen(odd, 4096, 4096, blind=True) == NARROW


def test_blind_choice_is_that_without_all_cases_of_the_shape():
    drawn = np.random.default_rng(3)
    noisy = replace(TABLE, us=TABLE.us * np.exp(0.1 * drawn.standard_normal(TABLE.us.shape)))

    for shape in SHAPES:
        others = Stored({8: without(noisy, shape)})
        assert chosen(Stored({8: noisy}), *shape, blind=True) == chosen(others, *shape)


def test_rarely_timed_configuration_without_a_model_comes_last():
    us = TABLE.us.copy()
    us[11:, 1] = math.nan

    assert chosen(Stored({8: replace(TABLE, us=us)}), 28672, 5000) == NARROW
    assert chosen(Stored({}), 28672, 5000) == NARROW


def test_cost_model_decides_where_nothing_was_timed():
    def place(config, gemm, device):
        return Place(math.log(3.0 if config == NARROW else 2.0), (math.log(gemm.n),))

    gemm = GemmWorkload(64, 4096, 4096)
    assert Stored({}).choose([NARROW, WIDE], gemm, H200, place) == WIDE
    # What was timed nearby corrects it.
    slow = replace(
        TABLE, cases=tuple(replace(c, m=64) for c in TABLE.cases), us=TABLE.us * [1.0, 3.0]
    )
    timed = Stored({MANY_TOKENS: slow})
    timed.is_blind = True
    assert timed.choose([NARROW, WIDE], gemm, H200, place) == NARROW


def test_predicted_time_steps_follow_blocks_and_warps():
    """An SM's blocks run one after another, and a block's warps all take as many steps as one."""
    drawn = random.Random(5)
    shapes = sorted(
        {(16 * drawn.randrange(64, 2000), 128 * drawn.randrange(8, 200)) for _ in range(80)}
    )
    tiles = [Tile(rows, warps, 1, 1) for rows in (1, 2, 3, 5) for warps in (4, 8)]
    us = np.array([[wave_us(tile, *shape) for tile in tiles] for shape in shapes])
    cases = tuple(GemmWorkload(8, *shape) for shape in shapes)
    timed = Stored({8: TimedCases(tuple(map(name_of, tiles)), cases, (H200,) * len(cases), us)})

    lost = us / us.min(axis=1, keepdims=True) - 1
    columns = [tiles.index(chosen(timed, *shape, configs=tiles, blind=True)) for shape in shapes]
    assert min(lost.mean(axis=0)) > 0.1  # of the same configuration everywhere
    assert lost[np.arange(len(lost)), columns].mean() < 0.012


def wave_us(tile, n, k):
    blocks = np.ceil(np.ceil(n / 16 / tile.row_tiles) / 132)
    steps = np.ceil(k / 128 / tile.warps) * tile.warps
    return 2 + 0.02 * blocks * steps * (tile.row_tiles + 0.5)


def test_a_similar_kernel_stands_in_for_cases_that_are_missing():
    similar = Stored({8: TABLE})
    own = Stored({8: without(TABLE, None)}, like=similar)
    alone = Stored({}, like=similar)

    for timed in (own, alone):
        assert chosen(timed, 4200, 5000) == NARROW
        assert chosen(timed, 28700, 5000) == WIDE


def test_own_cases_outweigh_those_of_a_similar_kernel():
    own = replace(TABLE, us=TABLE.us[:, ::-1])

    assert chosen(Stored({8: own}, like=Stored({8: TABLE})), 4200, 5000) == WIDE


def test_missing_column_tiles_come_from_the_similar_kernel():
    configs = [c for c in FLEXQ.for_few(24, 4096) if c.k_split == 1]
    gemm = GemmWorkload(24, 4100, 4100)

    found = [c.timed.choose_few(configs, gemm, H200, 3) for c in (TWO_LEVEL, FLEXQ)]
    assert 24 not in TWO_LEVEL.timed.tables
    assert found[0] == found[1]


def test_default_fields_are_left_out_of_names():
    assert name_of(NARROW) == "Tile(row_tiles=1, warps=8, k_split=1, col_tiles=1)"
    assert name_of(replace(NARROW, eager=1)) == f"{name_of(NARROW)[:-1]}, eager=1)"


def test_tables_are_read_as_the_benchmark_wrote_them(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    heuristic = importlib.import_module("heuristic")
    us = np.array([[1.0, np.nan], [1.123, 7.5], [1.2, 1.0]])
    some = replace(TABLE, cases=TABLE.cases[:3], devices=(H200, H200, H100), us=us)

    found = read_tables(heuristic.write_tables({MANY_TOKENS: TABLE, 8: some}))

    for group, written in ((MANY_TOKENS, TABLE), (8, some)):
        table = found[group]
        assert (table.configs, table.cases) == (written.configs, written.cases)
        assert table.devices == written.devices
        np.testing.assert_allclose(table.us, written.us)


@pytest.mark.parametrize("sms", [84, 108, 144])
@pytest.mark.parametrize("timed", TIMED, ids=lambda timed: timed.name)
def test_equal_rows_per_sm_are_nearby_on_other_gpus(timed, sms):
    config = ImmaConfig(2, 8, 2, 1, 0, 1)
    for gemm in timed.tables[8].cases[::20]:
        rows = 16 * 132 * max(1, gemm.n // (16 * 132))
        here = few_tokens_place(config, GemmWorkload(8, rows, gemm.k), Device(132, 3300))
        there = GemmWorkload(8, rows * sms // 132, gemm.k)
        other = few_tokens_place(config, there, Device(sms, 25.0 * sms))
        assert here.coordinates == pytest.approx(other.coordinates)


@pytest.mark.parametrize(("label", "tiles"), [*product(WEIGHT_ONLY, (1, 2, 4))])
def test_most_candidates_of_weight_only_kernels_are_in_tables(label, tiles):
    known = set(WEIGHT_ONLY[label].tables[8 * tiles].configs)
    configs = resolve(label, "cuda").configs(tiles)

    assert sum(name_of(c) in known for c in configs) > len(configs) / 2


@pytest.mark.parametrize("candidates", IMMA.values(), ids=IMMA)
def test_tables_have_most_candidates_of_every_case(candidates):
    table = candidates.timed.tables[MANY_TOKENS]
    for tiles in (1, 2, 4):
        few = set(candidates.timed.tables[8 * tiles].configs)
        configs = candidates.few[tiles]
        assert sum(name_of(c) in few for c in configs) > len(configs) / 2

    assert len(table.cases) > 200
    assert {48, 64, 96, 128, 512, 1024, 2048} <= {gemm.m for gemm in table.cases}
    many = (config for config in candidates.costs if not isinstance(config, TiledConfig))
    assert set(table.configs) == set(map(name_of, many))
    for gemm, device, us in zip(table.cases[::7], table.devices[::7], table.us[::7], strict=True):
        fit = set(candidates.for_gemm(gemm, device.sms, in_mma_order=True))
        general = {c for c in fit if not (isinstance(c, ClusterConfig) and c.for_few_outputs)}
        timed = {name for name, x in zip(table.configs, us, strict=True) if not math.isnan(x)}
        assert candidates.in_mma_order(gemm.m, gemm.k)
        assert timed <= set(map(name_of, fit))
        assert len(timed & set(map(name_of, general))) >= 0.75 * len(general)


def test_faster_memory_shortens_what_reads_weights():
    gemm, config = GemmWorkload(33, 28672, 8192), ClusterConfig(3, 64, 7, 1, 1)

    slow, fast = (FLEXQ.place_for_many(config, gemm, gpu).cost for gpu in (H100, H200))

    assert 1.1 < math.exp(slow - fast) < 3352 / 4917 * 2.3
