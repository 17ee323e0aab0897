"""Start and end of pairs of workers."""

from __future__ import annotations

import itertools
import os

import pytest

from flexq_bench.errors import BrokenRevisionError
from flexq_bench.measure.ab import InterleaveRules, compare_judged, course
from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment
from flexq_bench.measure.ab.worker_pairs import can_start_beside
from flexq_bench.measure.worker_process import WorkerError
from flexq_bench.workloads.case import Case

CASE = Case.from_key("flexq-w6a6 gemm cold m1n64k64")
OTHER = Case.from_key("flexq-w6a8 gemm cold m1n64k64")
RULES = InterleaveRules(processes=5, blocks=2, looks=1, timeout_s=20.0)
AHEAD = [4, 6, 8, 10, 10]
ONE_BY_ONE = [2, 4, 6, 8, 10]


@pytest.fixture
def compared(a_tree, command):
    """Compare two trees, each process but the first started ahead unless told otherwise."""

    def run(base=None, head=None, cases=(CASE,), rules=RULES, **options):
        trees = a_tree("base", **(base or {})), a_tree("head", **(head or {}))
        options = {"starts_ahead": True, "command": command} | options
        experiment = ABExperiment(*trees, rules, "cpu", **options)
        return compare_cases([(experiment, [(case, case) for case in cases])])

    return run


@pytest.fixture
def counted(compared, started):
    """Compare two trees; for each pair of processes that measured, how many had been started."""

    def run(*behaviours, **options):
        found = {}

        def note(_case, block):
            found.setdefault(block.process, len(started))

        list(compared(*behaviours, on_block=note, **options))
        return list(found.values())

    return run


@pytest.mark.parametrize(
    ("starts_ahead", "processes"), [(True, AHEAD), (False, ONE_BY_ONE), (None, ONE_BY_ONE)]
)
def test_next_pair_starts_ahead_only_if_requested(counted, starts_ahead, processes):
    assert counted(starts_ahead=starts_ahead) == processes


@pytest.mark.parametrize(
    ("device", "cpus", "can"),
    [("cuda", 8, True), ("cuda:1", 64, True), ("cuda", 7, False), ("cpu", 64, False)],
)
def test_workers_start_ahead_on_gpus_with_enough_cpus(monkeypatch, device, cpus, can):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(cpus))

    assert can_start_beside(device) is can


@pytest.mark.parametrize("side", ["base", "head"])
def test_older_workers_are_not_started_ahead(counted, side):
    behaviours = {"base": {}, "head": {}} | {side: {"waits": False}}

    assert counted(*behaviours.values()) == ONE_BY_ONE


def test_single_process_for_both_sides_starts_ahead(counted):
    assert counted(one_process=True) == [2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("head", "used", "unused"),
    [({}, 5, 0), ({"refuse": "not this case"}, 1, 1), ({"fail_at": "turn"}, 2, 1)],
)
def test_at_most_one_pair_is_unused_and_all_end(
    compared, started, requests, running, head, used, unused
):
    list(compared({}, head, cases=(CASE, OTHER)))

    for side in ("base", "head"):  # the first one describes itself twice
        assert [request["do"] for request in requests(side)].count("describe") == used + 1
        assert [worker.name for worker in started].count(side) == used + unused
        assert running(side) == []


def test_waiting_pair_ends_with_a_closed_comparison(compared, running, eventually):
    results = compared({}, {"refuse": "not this case"}, cases=(CASE, OTHER))
    next(results)
    eventually(lambda: (len(running("base")), len(running("head"))) == (1, 1))
    results.close()

    assert running("base") == running("head") == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_waiting_pair_ends_with_a_failed_comparison(compared, started, running, error):
    def fail(_case, _block):
        raise error

    with pytest.raises(error):
        list(compared(on_block=fail))

    assert len(started) == 4
    assert running("base") == running("head") == []


@pytest.mark.parametrize(("side", "error"), [("base", WorkerError), ("head", BrokenRevisionError)])
def test_worker_that_dies_while_waiting_is_an_error(
    compared, running, eventually, tmp_path, side, error
):
    def wait_for_its_death(_case, _block):
        starts = tmp_path / side / "starts"
        eventually(lambda: starts.read_text() == "xx" and len(running(side)) <= 1)

    message = rf"^{side} died \(exit code 1\) at 'describe': ImportError: no module named gone"
    with pytest.raises(error, match=message):
        list(compared(**{side: {"dead": 1}}, on_block=wait_for_its_death))

    assert running("base") == running("head") == []


@pytest.mark.parametrize("warms", [True, False])
@pytest.mark.parametrize("needed", [1, 40])
def test_pairs_start_together_and_the_first_measures_alone(
    counted, requests, monkeypatch, warms, needed
):
    monkeypatch.setattr(course, "available_cpus", lambda: 4)
    monkeypatch.setattr(course, "_is_on_cpu", lambda _experiment: False)
    behaviour = {"warms": warms, "needed": needed}

    assert counted(behaviour, behaviour, starts_ahead=False) == [6, 6, 6, 10, 10]

    asked = [request["do"] for request in requests("head")]
    assert asked.count("place") == 5
    assert ("place", "place") in itertools.pairwise(asked) or not warms or needed > 25


@pytest.mark.parametrize("both", [True, False])
def test_later_processes_take_what_the_first_one_found(counted, requests, both):
    counted({"learns": True}, {"learns": both}, starts_ahead=False)

    placed = [request for request in requests("base") if request["do"] == "place"]
    known = [(request.get("launches"), request.get("device_mhz")) for request in placed]
    assert known == [(None, None), *[(7, 1500.0) if both else (None, None)] * 4]


@pytest.mark.parametrize(("us", "pairs"), [(150.0, 6), (100.0, 5)], ids=["slower", "same"])
def test_pair_for_the_look_starts_with_those_before_it(counted, monkeypatch, us, pairs):
    monkeypatch.setattr(course, "available_cpus", lambda: 8)
    monkeypatch.setattr(course, "_is_on_cpu", lambda _experiment: False)
    rules = InterleaveRules(processes=6, looks=1, timeout_s=20.0)

    head = {"warms": True, "us": us}
    started = counted({"warms": True}, head, rules=rules, starts_ahead=False)

    assert started == [12] * pairs


def test_judged_comparison_starts_no_worker_ahead(repository, command, started, monkeypatch):
    monkeypatch.setattr("flexq_bench.measure.ab.course.can_start_beside", lambda _device: True)
    base = repository.commit(refuse="not this case")
    (repository.path / "kernels").mkdir()
    (repository.path / "kernels" / "other.py").write_text("code = 1\n")
    head = repository.commit(refuse="nor this one")

    (found,) = compare_judged(
        repository.path, base, head, [CASE], device="cpu", rules=RULES, command=command
    )

    assert "not this case" in found.detail
    assert len(started) == 2  # they are checked, and measure
