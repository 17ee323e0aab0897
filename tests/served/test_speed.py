"""Speed of served models: traces, loops, metrics, and the gate on local servers."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.served.client import Answer, Outcome
from flexq_bench.served.engines import EngineSpec, RunningEngine
from flexq_bench.served.speed import load
from flexq_bench.served.speed.gate import comparison_of, judge_failed, judge_speed
from flexq_bench.served.speed.load import RequestTimes, Segment, run_segment
from flexq_bench.served.speed.metrics import LatencyLimits, metric, pooled_interval, segment_value
from flexq_bench.served.speed.policy import SpeedTable
from flexq_bench.served.speed.requests import (
    PlannedRequest,
    fixed_lengths,
    read_trace,
    request_of,
    with_arrivals,
)
from flexq_bench.served.turns import Places, taking_turns
from flexq_bench.verdicts import Verdict, confirm
from flexq_bench.workloads.data_files import validated
from flexq_bench.workloads.errors import WorkloadError

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "served" / "speed_power.py"
SHORT = {
    "name": "short",
    "lengths": "fixed",
    "prompt_tokens": 4,
    "new_tokens": 10,
    "concurrency": 4,
    "requests": 8,
    "warmup_requests": 4,
    "cooldown_s": 0.0,
}


@pytest.fixture(scope="module")
def power(load_module):
    """The benchmark of the gate's power."""
    return load_module(BENCHMARK)


def a_table(**values):
    return validated(SpeedTable, {**SHORT, **values}, "policy.toml")


def times(ttft=0.1, tpot=0.01, tokens=11, due=0.0):
    e2e = ttft + tpot * (tokens - 1)
    return RequestTimes(due, due + e2e, ttft, tpot, e2e, tokens)


FAILED = RequestTimes(0.0, 1.0, None, None, None, 0, "timed out")


# --- traces


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "seconds,prompt,new\n3.5,10,20\n1.5,7,8\n"),
        ("a.jsonl", '{"timestamp": 1500, "input_length": 7, "output_length": 8}\n'
         '{"timestamp": 3500, "input_length": 10, "output_length": 20}\n'),
        ("b.jsonl", '{"seconds": 1.5, "prompt_tokens": 7, "new_tokens": 8}\n\n'
         '{"seconds": 3.5, "prompt_tokens": 10, "new_tokens": 20}\n'),
    ],
)  # fmt: skip
def test_recorded_trace_is_read_in_order_of_arrival(name, content, tmp_path):
    (tmp_path / name).write_text(content)

    trace = read_trace(str(tmp_path / name))

    assert trace == [PlannedRequest(0.0, 7, 8), PlannedRequest(2.0, 10, 20)]


@pytest.mark.parametrize(
    "content",
    ["", "prompt,new\n", "1,2\n3\n", "1,2\n-1,4\n", "1,2\nnan,1,2\n", "1,2\n0,2\n", "1,2\n1,1e9\n"],
)
def test_invalid_trace_is_refused(content, tmp_path):
    (tmp_path / "a.csv").write_text(content)

    with pytest.raises(UsageError, match=r"a\.csv"):
        read_trace(str(tmp_path / "a.csv"))


def test_poisson_arrivals_have_the_rate_and_follow_the_seed():
    requests = fixed_lengths(4000, 4, 8)

    first, same, other = (with_arrivals(requests, "poisson", 20.0, seed) for seed in (1, 1, 2))

    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(first)]
    mean = sum(gaps) / len(gaps)
    assert first == same != other
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(
        mean**2, rel=0.15
    )  # as of an exponential distribution


def test_recorded_arrivals_are_sped_up():
    trace = [PlannedRequest(at, 1, 1) for at in (4.0, 6.0, 7.0)]

    arrivals = [one.arrival_s for one in with_arrivals(trace, "recorded", 2.0, 0)]

    assert arrivals == [0.0, 1.0, 1.5]


def test_prompts_differ_so_that_no_cache_has_them():
    prompts = {request_of(PlannedRequest(0, 30, 1), 7, number).prompt for number in range(50)}

    assert len({prompt[:40] for prompt in prompts}) == 50


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"metrics": ["p50_itl"]}, "no metric 'p50_itl'"),
        ({"metrics": ["goodput"]}, "goodput needs"),
        ({"limits": {"p99_ttft": 3.0}}, "p99_ttft, which is not among metrics"),
        ({"lengths": "recorded"}, "file goes with"),
        ({"arrivals": "recorded"}, "needs lengths"),
        ({"arrivals": "poisson", "rate_per_s": 0.0}, "rate_per_s must be above 0"),
        ({"name": "Two words"}, "a name is like"),
    ],
)
def test_invalid_load_is_refused(values, reason):
    with pytest.raises(WorkloadError, match=reason):
        a_table(**values)


# --- metrics


@pytest.mark.parametrize(
    ("name", "slower", "direction"),
    [
        ("median_ttft", times(ttft=0.2), "lower"),
        ("p99_ttft", times(ttft=0.2), "lower"),
        ("mean_tpot", times(tpot=0.02), "lower"),
        ("median_e2e", times(tpot=0.02), "lower"),
        ("tokens_per_s", times(tpot=0.02), "higher"),
        ("requests_per_s", times(tpot=0.02), "higher"),
        ("goodput", times(ttft=2.0), "higher"),
    ],
)
def test_slower_engine_is_slower_by_every_metric(name, slower, direction):
    of, limits = metric(name), LatencyLimits(ttft_ms=500)
    base, head = (segment_value(of, Segment((one,) * 4), limits) for one in (times(), slower))
    values = [[(base * (1 + 1e-4 * i), head)] * 2 for i in range(12)]

    verdict = confirm(comparison_of(of, values)).verdict

    assert of.direction == direction
    assert (head > base) == (direction == "lower")
    assert verdict is Verdict.SLOWER


def test_goodput_counts_requests_within_all_limits():
    limits = LatencyLimits(ttft_ms=150, tpot_ms=15)
    segment = Segment((times(), times(ttft=0.2), times(tpot=0.02), FAILED))

    assert segment_value(metric("goodput"), segment, limits) * segment.seconds == pytest.approx(1.5)


def test_quantiles_are_of_all_requests_with_an_interval():
    segments = [
        Segment(tuple(times(ttft=0.1 + 0.01 * i + 0.001 * j) for i in range(10))) for j in range(20)
    ]

    pooled = pooled_interval(metric("p90_ttft"), segments, LatencyLimits(), seed=0)

    ordered = sorted(1e3 * one.ttft_s for segment in segments for one in segment.times)
    assert pooled.estimate == pytest.approx(ordered[179])
    assert pooled.low < pooled.estimate < pooled.high


def test_failed_requests_count_as_the_slowest():
    slow, fails = times(ttft=0.5, tpot=0.05), RequestTimes(0.0, 0.2, None, None, None, 0, "lost")
    answered, dropped, late = (Segment((times(), times(), one)) for one in (slow, fails, FAILED))

    def value(name, segment):
        return segment_value(metric(name), segment, LatencyLimits())

    assert (dropped.failed, late.failed) == (1, 1)
    assert value("mean_ttft", answered) > value("mean_ttft", dropped) > 100
    assert value("p99_ttft", late) > value("p99_ttft", answered)
    assert value("mean_tpot", late) == pytest.approx(10)
    assert math.isnan(segment_value(metric("mean_e2e"), Segment((FAILED,)), LatencyLimits()))


# --- load


class SlowClient:
    """An engine that answers one request at a time, each in 50 ms."""

    def __init__(self, *_, **__):
        self.lock = asyncio.Lock()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def send(self, request):
        async with self.lock:
            sent = time.perf_counter()
            await asyncio.sleep(0.05)
        return Answer(Outcome.OK, "a b", "length", sent, (0.025, 0.05), 0.05, 1, 2)


ENGINE = RunningEngine("base", "http://127.0.0.1:1", "m", 0.0, lambda: "")


def test_open_loop_counts_wait_from_due_time(monkeypatch):
    monkeypatch.setattr(load, "Client", SlowClient)
    planned = with_arrivals(fixed_lengths(10, 1, 2), "constant", 100.0, 0)

    waited = [one.e2e_s for one in run_segment(ENGINE, planned, concurrency=None, seed=0).times]

    # Sent late by the queue of those before, although each took 50 ms once it was sent.
    assert waited == sorted(waited)
    assert waited[-1] > 0.3


def test_closed_loop_has_its_number_of_requests_under_way(monkeypatch):
    monkeypatch.setattr(load, "Client", SlowClient)
    segment = run_segment(ENGINE, fixed_lengths(6, 1, 2), concurrency=2, seed=0)

    assert all(one.e2e_s == pytest.approx(0.05, abs=0.01) for one in segment.times)
    assert segment.seconds > 0.25
    assert {one.characters for one in segment.times} == {len("a b")}


# --- the gate


def made_blocks(power, *, sigma=0.01, placements=24):
    """Blocks of two equal engines, drawn: times of requests with noise of segments and requests."""
    import numpy as np

    generator = np.random.default_rng(5)

    def segment():
        of_segment = math.exp(generator.normal(0, sigma))
        return Segment(
            tuple(
                times(
                    ttft=0.1 * math.exp(generator.normal(0, 0.05)),
                    tpot=0.01 * of_segment * math.exp(generator.normal(0, 0.03)),
                )
                for _ in range(8)
            )
        )

    placed = [
        [{side: [segment(), segment()] for side in ("base", "head")} for _ in range(2)]
        for _ in range(placements)
    ]
    return power.Measured(power.TABLE, placed)


@pytest.mark.slow
def test_delay_of_3_percent_is_found_in_resampled_gates(power):
    measured = made_blocks(power)

    none = power.simulated_rates(measured, gates=100, percent=0.0, seed=2)
    delayed = power.simulated_rates(measured, gates=100, percent=3.0, seed=3)

    assert none.found <= 0.02
    assert delayed.found >= 0.9
    assert delayed.of_metric["median_tpot"] >= 0.9


@pytest.mark.parametrize(
    ("base", "head", "outcome"),
    [(0, 0, "pass"), (0, 1, "pass"), (6, 6, "pass"), (0, 6, "ambiguous"), (0, 7, "fail")],
)
def test_more_failed_requests_than_accepted_do_not_pass(power, base, head, outcome):
    def segment(failed):
        return Segment((FAILED,) * failed + (times(),) * (256 - failed))

    sides = {"base": [segment(base)], "head": [segment(head)]}

    assert judge_failed(power.Measured(power.TABLE, [[sides]])).outcome == outcome


def test_failing_engine_ends_the_gate_with_its_reason(power):
    with (
        power.servers(("--tpot-ms", "1"), ("--tpot-ms", "1", "--refuse", "500")) as (base, head),
        taking_turns(base, head, Places()) as turns,
    ):
        report = judge_speed([a_table(), a_table(name="other")], turns)

    assert "head: all requests failed: server error" in report.problem
    assert {limit.outcome for limit in report.limits} == {"not judged"}


def test_engine_that_refuses_a_part_fails_by_its_requests(power):
    options = ("--tpot-ms", "1", "--ttft-ms", "1")
    with (
        power.servers(options, (*options, "--refuse", "429:0.3")) as (base, head),
        taking_turns(base, head, Places()) as turns,
    ):
        report = judge_speed([a_table()], turns, rules=InterleaveRules(looks=1))

    failed, *others = report.limits
    assert (failed.outcome, failed.base) == ("fail", 0)
    assert failed.value == pytest.approx(30, abs=12)
    assert all("requests failed" in limit.reason for limit in others)
    assert report.sound == ()


@pytest.mark.parametrize(("characters", "said"), [(22, ""), (21, "head: 1.9"), (0, "head: 0")])
def test_times_of_tokens_that_are_only_counted_say_little(power, characters, said):
    base, head = (replace(times(), characters=count) for count in (44, characters))
    measured = power.Measured(
        power.TABLE, [[{"base": [Segment((base,))], "head": [Segment((head,))]}]]
    )

    assert measured.unsound.startswith(said)
    assert bool(measured.unsound) == bool(said)


@pytest.mark.parametrize("starts", ["once", "anew"])
def test_engine_that_warms_up_slowly_is_named(power, starts):
    measured = made_blocks(power, placements=12)
    for number, blocks in enumerate(measured.placements):
        first = blocks if starts == "once" and not number else blocks[: starts == "anew"]
        for block in first:
            slow = [replace(one, tpot_s=3 * one.tpot_s) for one in block["head"][0].times]
            block["head"] = [Segment(tuple(slow))] * 2

    assert made_blocks(power, placements=12).warming == ""
    assert measured.warming.startswith(("head: 3.0 times", "head: 2.9", "head: 3.1"))


def test_engine_that_does_not_start_is_a_stated_outcome():
    gone = EngineSpec("base", command=(sys.executable, "-c", "raise SystemExit(3)  # {port}"))
    with taking_turns(gone, gone, Places()) as turns:
        report = judge_speed([a_table()], turns)

    assert "exit code 3" in report.problem
    assert {limit.outcome for limit in report.limits} == {"not judged"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_real_gate_finds_a_delay_and_nothing_else(power, seed):
    for percent in (0.0, 3.0):
        report = power.real_gate(percent, seed)
        outcomes = {limit.check.split(": ")[1]: limit.outcome for limit in report.limits}
        assert (outcomes["median_tpot"] == "fail") == (percent > 0), outcomes
        assert ("fail" in outcomes.values()) == (percent > 0), outcomes


@pytest.mark.slow
def test_stored_blocks_have_power_and_few_false_alarms(power):
    measured = power.measured_blocks()
    measured.table = power.TABLE

    none = power.simulated_rates(measured, gates=1000, percent=0.0, seed=1)
    delayed = power.simulated_rates(measured, gates=1000, percent=3.0, seed=1)

    assert none.found <= 0.01
    assert delayed.found >= 0.9
