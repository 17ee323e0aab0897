"""Timing of candidates: coarse and brief times, on a warm or cold device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexq_bench.measure import PROTOCOL_CUDA
from flexq_bench.measure.clocks import Batch, CpuClock
from flexq_bench.measure.protocol import WarmUp
from flexq_bench.measure.tuning import BriefTimer

LAUNCH_US = 10


@pytest.fixture
def spent():
    """Microseconds of launches that a BriefTimer takes for a glance, then for a time."""

    class Buffers:
        copies = 40

        def __init__(self):
            self.launches = 0

        def bound(self, config):
            return self.launch

        def launch(self, i):
            self.launches += 1

    def run(*, warm):
        buffers = Buffers()
        clock = CpuClock(lambda: 1000 * LAUNCH_US * buffers.launches)
        protocol = replace(
            PROTOCOL_CUDA,
            warm_up=replace(PROTOCOL_CUDA.warm_up, min_s=0.02),
            rewarm=replace(PROTOCOL_CUDA.rewarm, min_s=0.0),
        )
        timer = BriefTimer(lambda: buffers, clock, protocol, warm=warm)
        found = []
        for ask in (timer.glance, timer.glance, timer):
            before = buffers.launches
            assert ask(None) == LAUNCH_US
            found.append(LAUNCH_US * (buffers.launches - before))
        return found

    return run


def test_candidates_are_timed_with_the_gaps_of_the_regime():
    seen = []

    class Gapped:
        launches = 10

        def sample(self, count, *, gap_us=0.0):
            seen.append(gap_us)
            return Batch((LAUNCH_US,) * count, (None,) * count)

        def close(self):
            pass

    class Clock:
        def rotation(self, *_):
            return Gapped()

    class Buffers:
        copies = 1

        def bound(self, config):
            return None

    protocol = replace(PROTOCOL_CUDA, rewarm=WarmUp(0.0, 0.0))
    for regime, gap_us in (("boost", 200.0), ("sustained", 0.0)):
        timer = BriefTimer(Buffers, Clock(), protocol, regime=regime, warm=True)
        timer(None)
        timer.glance(None)
        assert seen[-1] == gap_us


def test_coarse_time_takes_a_fraction_of_a_brief_time(spent):
    _, glance, time = spent(warm=True)

    assert 300 <= glance < 500  # three samples of 100 us, and those that find their length
    assert time > 2800  # seven of 400 us behind a warm-up


def test_first_candidate_has_a_whole_warm_up_if_cold(spent):
    cold, second, _ = spent(warm=False)
    warm, _, _ = spent(warm=True)

    assert cold > 5 * warm
    assert second < warm
