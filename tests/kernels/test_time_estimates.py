"""Estimates of times for many tokens, corrected by timed cases."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from flexq_bench.kernels.cuda.imma.configuration_choice import (
    ATOM,
    DUAL_GRAINED,
    FLEXQ,
    GROUP_SCALED,
    TWO_LEVEL,
)
from flexq_bench.kernels.cuda.imma.configurations import (
    SIX_BITS,
    ClusterConfig,
    ManyConfig,
    PersistentConfig,
    TiledConfig,
    WgmmaConfig,
)
from flexq_bench.kernels.cuda.imma.time_estimates import (
    Cases,
    Cost,
    TimedCases,
    coordinates,
    cost_us,
    load_cases,
    read_cases,
    waves_of,
    write_cases,
)
from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

H100, H200 = Device(132, 3352), Device(132, 4917)
COSTS: dict[ManyConfig, Cost] = {
    WgmmaConfig(1, 1, 4, 2): Cost(3.0, 0.5, 0.3, 90),
    ClusterConfig(2, 64, 4, 2, 2): Cost(1.0, 0.5, 0.5, 80),
    PersistentConfig(1, 1, 1): Cost(4.0, 0.5, 0.5, 168),
}
WARPGROUPS, CLUSTER, PERSISTENT = COSTS
ALL = {"flexq": FLEXQ, "atom": ATOM, "group": GROUP_SCALED, "dgq": DUAL_GRAINED, "dual": TWO_LEVEL}


class Stored(TimedCases):
    """With a table in a folder of the test."""

    def __init__(self, folder, table):
        super().__init__("stored", COSTS)
        self._file = folder / "stored.json"
        self._file.write_text(write_cases(table))

    @property
    def file(self):
        return self._file


def cost(config, gemm, device):
    waves = waves_of(config, COSTS[config], gemm, device.sms, SIX_BITS)
    return cost_us(COSTS[config], waves, gemm, device.memory_gbps)


def random_cases(count):
    drawn = random.Random(0)
    shapes = [(128 * drawn.randint(4, 200), 128 * drawn.randint(4, 120)) for _ in range(count // 2)]
    return [GemmWorkload(m, n, k) for n, k in shapes for m in (64, 128)]


def table_of(cases, device=H200):
    """Clusters take 1.5 times their cost where K is long, the others always 0.9 times."""

    def us(config, gemm):
        factor = 0.9 if config != CLUSTER else 1.5 if gemm.k > 8192 else 1.0
        return factor * cost(config, gemm, device)

    times = np.array([[us(config, gemm) for config in COSTS] for gemm in cases])
    return Cases(tuple(COSTS), tuple(cases), (device,) * len(cases), times)


def test_a_table_is_read_as_it_was_written():
    cases = random_cases(6)
    table = Cases(
        tuple(COSTS),
        tuple(cases),
        (H100, H100, H100, H200, H200, H200),
        np.array([[i + 1.25, math.nan if i % 2 else 7.5, 3.0] for i in range(6)]),
    )

    read = read_cases(write_cases(table))

    rows = {(read.cases[i], read.devices[i]): read.us[i] for i in range(6)}
    assert read.configs == table.configs
    assert len(rows) == 6
    for gemm, device, us in zip(cases, table.devices, table.us, strict=True):
        np.testing.assert_array_equal(rows[gemm, device], us)


@pytest.mark.parametrize(("k", "factor"), [(2048, 1.0), (14336, 1.5)])
def test_costs_are_corrected_by_similar_cases(tmp_path, k, factor):
    timed = Stored(tmp_path, table_of(random_cases(80)))
    gemm = GemmWorkload(64, 9984, k)

    us = {config: timed.estimated_us(config, gemm, H200, SIX_BITS) for config in COSTS}

    assert us[CLUSTER] == pytest.approx(factor * cost(CLUSTER, gemm, H200), rel=0.15)
    assert us[PERSISTENT] == pytest.approx(0.9 * cost(PERSISTENT, gemm, H200), rel=0.02)
    assert us[WARPGROUPS] == pytest.approx(0.9 * cost(WARPGROUPS, gemm, H200), rel=0.03)


def test_timed_case_is_estimated_near_its_time(tmp_path):
    table = table_of(random_cases(80))
    timed = Stored(tmp_path, table)

    for gemm, us in zip(table.cases[::9], table.us[::9], strict=True):
        found = [timed.estimated_us(config, gemm, H200, SIX_BITS) for config in COSTS]
        assert found == pytest.approx(us.tolist(), rel=0.12)


def test_unseen_estimate_equals_one_without_its_cases(tmp_path):
    whole = table_of(random_cases(40))
    left_out = whole.cases[6]
    kept = [i for i, case in enumerate(whole.cases) if (case.n, case.k) != (left_out.n, left_out.k)]
    assert len(kept) == len(whole.cases) - 2
    others = Cases(
        whole.configs,
        tuple(whole.cases[i] for i in kept),
        tuple(whole.devices[i] for i in kept),
        whole.us[kept],
    )
    for folder in ("all", "others"):
        (tmp_path / folder).mkdir()
    both = Stored(tmp_path / "all", whole), Stored(tmp_path / "others", others)
    never_timed = GemmWorkload(96, left_out.n, left_out.k)  # of the same shape

    for gemm in (left_out, never_timed):
        for config in COSTS:
            unseen = both[0].estimated_us(config, gemm, H200, SIX_BITS, unseen=True)
            without = both[1].estimated_us(config, gemm, H200, SIX_BITS)
            assert unseen == pytest.approx(without, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "k", "is_shared", "is_read_again"),
    [
        (4864, 28544, True, True),
        (4864, 1152, True, False),  # all operands fit L2
        (16896, 28544, False, False),  # 132 output tiles, one for each SM
    ],
)
def test_operands_that_stream_k_reads_again_are_in_the_coordinates(
    n, k, *, is_shared, is_read_again
):
    gemm = GemmWorkload(128, n, k)

    found = coordinates(PERSISTENT, COSTS[PERSISTENT], gemm, H100, SIX_BITS)

    assert (found.drift > 0) == is_shared
    assert (found.beyond_l2 > 0) == is_read_again
    without = coordinates(CLUSTER, COSTS[CLUSTER], gemm, H100, SIX_BITS)
    assert without.drift == 0
    assert (found.reread_share > without.reread_share) == is_read_again


def test_without_times_an_estimate_is_the_cost(tmp_path):
    timed = Stored(tmp_path, table_of([]))
    gemm = GemmWorkload(64, 4096, 4096)

    for config in COSTS:
        us = timed.estimated_us(config, gemm, H100, SIX_BITS)
        assert us == pytest.approx(cost(config, gemm, H100))


def test_faster_memory_shortens_what_reads_weights():
    gemm = GemmWorkload(33, 28672, 8192)
    config = ClusterConfig(3, 64, 7, 1, 1)

    slow, fast = (FLEXQ.many.estimated_us(config, gemm, gpu, SIX_BITS) for gpu in (H100, H200))

    assert 1.1 < slow / fast < 3352 / 4917 * 2.3


@pytest.mark.parametrize("candidates", ALL.values(), ids=ALL)
def test_tables_have_most_candidates_of_every_case(candidates):
    table = load_cases(candidates.many)
    numbers = {gemm.m for gemm in table.cases}

    assert len(table.cases) > 200
    assert {48, 64, 96, 128, 512, 1024, 2048} <= numbers
    assert set(table.configs) == {
        config for config in candidates.costs if not isinstance(config, TiledConfig)
    }
    for gemm, device, us in zip(table.cases, table.devices, table.us, strict=True):
        fit = set(candidates.for_gemm(gemm, device.sms, in_mma_order=True))
        general = {c for c in fit if not (isinstance(c, ClusterConfig) and c.for_few_outputs)}
        timed = {c for c, x in zip(table.configs, us, strict=True) if not math.isnan(x)}
        assert candidates.in_mma_order(gemm.m, gemm.k)
        assert timed <= fit
        assert len(timed & general) >= 0.75 * len(general)
