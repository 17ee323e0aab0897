"""Cases of several GPUs: a process on each, here gloo's on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.runtime.ranks import Ranks
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure import meter as meters
from flexq_bench.measure.ab import InterleaveRules, compare_commits
from flexq_bench.measure.ab.operations import WorkerOperations
from flexq_bench.measure.rank_worker import RankOperations
from flexq_bench.measure.ranked_case import RankedCase, RankedCases
from flexq_bench.measure.worker_process import WorkerError
from flexq_bench.repository.git import git_output
from flexq_bench.repository.provenance import ROOT
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import operation

CPU = torch.device("cpu")


def all_reduce(elements, gpus=2, **fields):
    workload = operation("all_reduce").workload(elements=elements, gpus=gpus)
    return Case("all-reduce", workload, stage="op", **fields)


class Alike(Ranks):
    """Two ranks with the same vectors, of which this is the first; `add` as given."""

    count = 2

    def __init__(self, add):
        self._add = add

    def add(self, x):
        return self._add(x)

    add_by_library = add

    def joined(self, x):
        return torch.cat([x, x], dim=1)

    def exchange(self, sent):
        sent.clone()


@pytest.mark.slow
def test_sums_of_two_processes_have_time_check_and_floor():
    meter = Meter("cpu", tuning=Tuning.NONE)
    try:
        results = [meter.measure(all_reduce(n)) for n in (8192, 1 << 18)]
    finally:
        meter._ranked.end()

    for result in results:
        assert result.status in ("ok", "noisy"), result.detail
        assert result.max_rel_error is not None
        assert 0 < result.floor_us < result.median_us
        assert len(result.extra["devices"]) == 2
    assert results[1].floor_us == pytest.approx(32 * results[0].floor_us)


# The vectors of ranks are not equal.
@pytest.mark.parametrize("add", [lambda x: x, lambda x: x.mul_(2)], ids=["alone", "doubled"])
def test_a_sum_that_lacks_the_other_ranks_vector_is_found(add):
    operations = RankOperations(CPU, Alike(add))
    operations.prepare(all_reduce(4096).key, 0, 1)

    assert operations.check("before")["detail"]
    operations.place(0)
    operations.sample(2)
    assert operations.inspect()["detail"]


def test_a_machine_with_too_few_gpus_is_a_stated_outcome(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    meter.backend, meter.capability = "cuda", (9, 0)
    monkeypatch.setattr(meters, "device_infos", lambda name, count: [meter.device_info])

    with pytest.raises(meters.UnsupportedError, match=r"needs 2 GPUs of a host, .* first of 1"):
        meter._check_supported(registry.resolve("all-reduce", "cuda").spec, all_reduce(64))


def test_a_function_of_one_gpu_is_not_given_two(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    meter.backend, meter.capability = "cuda", (9, 0)
    monkeypatch.setattr(meters, "device_infos", lambda name, count: [meter.device_info] * 2)
    spec = replace(registry.resolve("all-reduce", "cuda").spec, source_hash="a" * 64)

    with pytest.raises(meters.UnsupportedError, match="is a function of one GPU"):
        meter._check_supported(spec, all_reduce(64))


@pytest.mark.slow
def test_ranks_that_die_fail_one_case_only(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    try:
        prepared = meter._ranked.prepared(all_reduce(4096), 0, 1)
        prepared._ranks._processes[1].kill()
        # Either comes first.
        with pytest.raises(WorkerError, match=r"died|closed by peer"):
            prepared.check("before")
        assert meter._ranked.prepared(all_reduce(4096), 0, 1).check("before").detail == ""
    finally:
        meter._ranked.end()


class Scripted:
    """Ranks that answer without processes."""

    is_broken = False

    def __init__(self):
        self.asked = []

    def ask(self, what, **arguments):
        self.asked.append(what)
        times = [20.0 + 0.1 * (i % 3) for i in range(arguments.get("count", 0))]
        prepared = {"launches": 4, "floor_us": 10.0, "link_gb_s": 1.0}
        checked = {"max_rel_error": 0.0, "exact": False, "detail": ""}
        return [{"uuid": "a", "times_us": times, **prepared, **checked}] * 2


@pytest.fixture
def side(monkeypatch):
    """A worker of a comparison on a CPU, and its ranks."""
    operations, ranks = WorkerOperations(Meter("cpu", tuning=Tuning.NONE)), Scripted()
    monkeypatch.setattr(
        RankedCases, "prepared", lambda _, case, *seeds: RankedCase(ranks, case, *seeds)
    )
    return operations, ranks


def test_a_comparison_times_all_ranks(side):
    operations, ranks = side

    prepared = operations.prepare("base", all_reduce(4096).key)
    operations.place("base", 0, launches=4)
    turn = operations.turn("base")
    operations.leave("base")
    operations.release("base")

    assert (prepared["wrong"], prepared["config"], turn["launches"]) == ("", {}, 4)
    assert set(turn["samples_us"]) <= {20.0, 20.1, 20.2}
    assert ranks.asked[:4] == ["describe", "prepare", "check", "place"]
    assert ranks.asked[-2:] == ["inspect", "release"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_commit_is_compared_with_itself_on_two_ranks():
    rules = InterleaveRules(processes=5, looks=1)
    head = git_output(ROOT, "rev-parse", "HEAD").strip()

    [result] = compare_commits(ROOT, head, head, [all_reduce(8192)], device="cpu", rules=rules)

    assert result.detail == ""
    assert len(result.comparison.placement) == 10
