"""A plan on several workers: who does what, which are lost, and the same numbers with Ray."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest

from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.plan import EvaluationPlan
from flexq_bench.accuracy.ray_evaluation import Evaluating, Evaluation, Introduction, Units
from flexq_bench.accuracy.records import ResultOrigin
from flexq_bench.accuracy.results import MetricResult
from flexq_bench.accuracy.texts import Text
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import DeviceInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.fleet.workers import Finished, Joined, Lost
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.lifecycle import new_run

PLAN = EvaluationPlan(
    schemes=("w6a6", "w4a4"), texts=(Text("one", "text", "a", "0" * 64),), tasks=("piqa",)
)


def test_worker_keeps_its_scheme_until_every_scheme_is_started():
    units = Units([(scheme, task) for scheme in ("a", "b") for task in ("x", "y", "z")])
    assert units.take(None) == ("a", "x")
    assert units.take("a") == ("a", "y")
    assert units.take(None) == ("b", "x")
    assert units.take("c") == ("b", "y")  # another worker's scheme, the one with the most left
    assert {units.take("b"), units.take("b")} == {("b", "z"), ("a", "z")}
    assert units.take("a") is None


class MadeEvaluators:
    """Workers that answer at once; one dies of a unit as often as `deadly` says.

    replaces: another one takes the place of a worker that died.
    """

    refusals = ()

    def __init__(self, origin, deadly, hashes, replaces):
        self._origin, self._deadly, self._replaces = origin, dict(deadly), replaces
        self._events = []
        for number, model_hash in enumerate(hashes):
            self._join(f"host{number}", model_hash)

    arriving = 0

    def _join(self, host, model_hash):
        parameters = {unit: {} for unit in PLAN.units}
        origin = replace(self._origin, model_hash=model_hash)
        self._events.append(Joined(Evaluating(host, host, Introduction(origin, parameters))))

    def poll(self, timeout_s):
        events, self._events = self._events, []
        return events

    def call(self, worker, method, unit):
        assert method == "evaluate"
        if self._deadly.get(unit, 0) > 0:
            self._deadly[unit] -= 1
            self._events.append(Lost(worker, "the worker's process ended"))
            if self._replaces:
                self._join(f"{worker} again", "a" * 64)
        else:
            self._events.append(Finished(worker, [result_of(unit)]))


def result_of(unit):
    return MetricResult(
        scheme=unit[0],
        task=unit[1],
        task_version="1",
        data_hash="0" * 64,
        metric="acc",
        direction="higher",
        value=0.5,
        standard_error=None,
        n_items=1,
        values=(),
        parameters={},
    )


@pytest.fixture
def drive(tmp_path):
    """drive(deadly={unit: times}, hashes=(…)): PLAN by as many workers; findings, units done."""

    def run(deadly=(), hashes=("a" * 64, "a" * 64), replaces=False):
        device = DeviceInfo(uuid="cpu", sku="CPU", backend="cpu")
        run = new_run(SUITE, "manual", ())
        origin = ResultOrigin("tiny", "a" * 64, 0, run, current_commit(), device, {})
        done = []
        with open_database(str(tmp_path / "flexq.sqlite")) as database, ExitStack() as stack:
            evaluation = Evaluation(database, PLAN, lambda unit, findings: done.append(unit), stack)
            found = evaluation.carry_out(MadeEvaluators(origin, deadly, hashes, replaces))
        return found, done

    return run


def test_unit_of_a_lost_worker_is_evaluated_by_another(drive):
    found, done = drive(deadly={("w6a6", "one"): 1})
    assert [(f.scheme, f.task) for f in found] == list(PLAN.units)
    assert sorted(done) == sorted(PLAN.units)


def test_a_lost_worker_is_replaced(drive):
    found, _ = drive(deadly={("w6a6", "one"): 1}, hashes=("a" * 64,), replaces=True)
    assert [(f.scheme, f.task) for f in found] == list(PLAN.units)


def test_unit_that_kills_every_worker_ends_the_evaluation(drive):
    with pytest.raises(InfrastructureError, match="w6a6 on one killed 3 workers"):
        drive(deadly={("w6a6", "one"): 9}, replaces=True)


def test_losing_all_workers_is_an_error(drive):
    with pytest.raises(InfrastructureError, match="all workers are lost, the last on host"):
        drive(deadly={("fp16", "one"): 2})


def test_machine_with_another_model_is_refused(drive):
    with pytest.raises(AccuracyError, match="host1 has another tiny"):
        drive(hashes=("a" * 64, "b" * 64))


@pytest.mark.slow
def test_cluster_has_the_results_of_one_process(cli, tiny_llama):
    options = ("accuracy", "--model", str(tiny_llama), "--data", str(tiny_llama / "heldout.txt"))
    options += ("--max-tokens", "1275", "--schemes", "w6a6,w4a4", "--device", "cpu", "--json", "-")
    alone, together = cli(*options), cli(*options, "--cluster", "local")
    assert together.code == ExitCode.PASS, together.error
    values = []
    for ran in (alone, together):
        records = [json.loads(line) for line in ran.out.splitlines() if line.startswith("{")]
        values.append({(r["scheme"], r["metric"]): r["value"] for r in records})
    assert {scheme for scheme, _ in values[0]} == {"fp16", "w6a6", "w4a4"}
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    wrong = cli(*options[:2], "nowhere", *options[3:], "--cluster", "local")
    assert wrong.code == ExitCode.USAGE
    assert "flexq-bench: no model nowhere" in wrong.error.splitlines()[-1]
