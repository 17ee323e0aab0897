"""Rotations: number of launches of a sample, and the copies that they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexq_bench.measure import PROTOCOL_CPU, PROTOCOL_CUDA
from flexq_bench.measure.clocks import Batch, CpuClock, fit_launches


@pytest.fixture
def ticking():
    """A clock that only launches advance, each by 10 us."""

    class Ticking:
        def __init__(self):
            self.now_ns = 0
            self.seen = []

        def launch(self, i):
            self.seen.append(i)
            self.now_ns += 10_000

        def rotation(self, copies, **protocol):
            rules = replace(PROTOCOL_CPU, **protocol)
            return CpuClock(lambda: self.now_ns).rotation(self.launch, copies, rules)

    return Ticking()


def test_sample_is_the_time_of_a_single_launch(ticking):
    rotation = ticking.rotation(3, target_sample_us=100.0)

    assert rotation.launches == 10
    assert rotation.sample(4) == Batch((10.0,) * 4, (None,) * 4)


def test_sample_has_a_minimum_length(ticking):
    rotation = ticking.rotation(3, target_sample_us=1.0, min_sample_us=50.0)

    assert rotation.launches * 10.0 >= 50.0


@pytest.mark.parametrize("launch_us", [0.65, 3.0, 50.0, 900.0])
@pytest.mark.parametrize("copies", [1, 7])
def test_samples_reach_their_length_despite_graph_overhead(launch_us, copies):
    graphs = []

    def in_a_graph(launches):
        graphs.append(launches)
        return launch_us + 5.3 / launches

    fit_launches(copies, PROTOCOL_CUDA, in_a_graph)

    assert graphs[-1] * launch_us > 0.8 * PROTOCOL_CUDA.target_sample_us
    assert graphs[-1] % copies == 0
    assert len(graphs) <= 4


def test_launch_uses_the_least_recently_used_copy(ticking):
    rotation = ticking.rotation(7, target_sample_us=30.0)
    ticking.seen.clear()

    rotation.sample(5)

    steps = {(b - a) % 7 for a, b in zip(ticking.seen, ticking.seen[1:], strict=False)}
    assert steps == {1}
    assert set(ticking.seen) == set(range(7))


def test_cpu_is_measured_on_a_single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with CpuClock().device_guard():
            assert torch.get_num_threads() == 1

        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
