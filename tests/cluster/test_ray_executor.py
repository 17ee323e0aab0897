"""Ray on this machine: the same results as without, and none lost with an actor.

One Ray session serves the whole file: starting one takes seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from flexq_bench.cluster import RayExecutor
from flexq_bench.cluster.executor import MAX_ATTEMPTS
from flexq_bench.errors import InfrastructureError, MeasureError
from flexq_bench.execution import LocalExecutor
from flexq_bench.plan import Plan, build_plan
from workloads.case import Case
from workloads.gemm import GemmWorkload
from workloads.suites import load_suite

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own pipes


@pytest.fixture(scope="module")
def plan() -> Plan:
    suite = load_suite("smoke").restrict(kernels=["cublas*"], m=[4])
    return build_plan(suite, "cpu", None)


@pytest.fixture(scope="module")
def ray_executor() -> Iterator[RayExecutor]:
    with RayExecutor("local", backend="cpu", seed=3) as executor:
        yield executor


def test_a_cluster_gives_the_same_cases_and_statuses_as_this_process(ray_executor, plan):
    alone = LocalExecutor("cpu", seed=3)

    def status(outcome):
        # Whether a right result is noisy is chance: other programs use this CPU too.
        return outcome.measured.status.replace("noisy", "ok"), outcome.measured.exact

    here, there = (
        {outcome.case.key: status(outcome) for outcome in executor.execute(plan.cases)}
        for executor in (alone, ray_executor)
    )

    assert (ray_executor.backend, ray_executor.capability) == (alone.backend, alone.capability)
    assert there == here
    assert set(there) == set(plan.keys)


def test_a_killed_actor_loses_nothing_and_its_case_is_measured_again(ray_executor, plan):
    outcomes = []
    for outcome in ray_executor.execute(plan.cases):
        if not outcomes:
            os.kill(outcome.worker.pid, signal.SIGKILL)  # it has its next case by now
        outcomes.append(outcome)

    assert sorted(o.case.key for o in outcomes) == sorted(plan.keys)
    assert {o.measured.status for o in outcomes} <= {"ok", "noisy"}
    assert max(o.attempt for o in outcomes) == 2


def test_a_case_that_kills_its_worker_is_failed_after_three_attempts(ray_executor, monkeypatch):
    deadly = Case("cublas-fp16", GemmWorkload(1, 64, 64))
    harmless = Case("cublas-fp16", GemmWorkload(1, 32, 32))
    hand_out = RayExecutor._hand_out

    def hand_out_then_kill(self, backlog, running):
        hand_out(self, backlog, running)
        for slot, job in running.values():
            if job.case == deadly:
                os.kill(slot.worker.pid, signal.SIGKILL)

    monkeypatch.setattr(RayExecutor, "_hand_out", hand_out_then_kill)

    outcomes = {o.case: o for o in ray_executor.execute([deadly, harmless])}

    assert outcomes[harmless].measured.status in ("ok", "noisy")
    assert outcomes[deadly].measured.status == "failed"
    assert outcomes[deadly].attempt == MAX_ATTEMPTS
    assert "died 3 times" in outcomes[deadly].measured.detail
    assert outcomes[deadly].measured.weight_bits == 16


def test_a_case_too_large_is_refused_before_any_is_handed_out(ray_executor):
    huge = Case("cublas-fp16", GemmWorkload(1 << 24, 1 << 24, 8))

    with pytest.raises(MeasureError, match="would take"):
        ray_executor.check([huge])


def test_no_gpu_in_the_cluster_is_said_at_the_start(ray_executor, monkeypatch):
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr("flexq_bench.cluster.runtime._start", lambda folder, gpus: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)

    with pytest.raises(InfrastructureError, match="has no GPU"):
        RayExecutor("local", backend="cuda", seed=0).__enter__()
