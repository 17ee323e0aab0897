"""Suites that mix cases of one and several GPUs, on simulated ones: nothing waits for ever."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.fleet import drain
from flexq_bench.fleet import RayPool, RayWorkers, Work
from flexq_bench.fleet import local_pool as local
from flexq_bench.fleet.local_pool import LocalPool
from flexq_bench.fleet.workers import Lost
from flexq_bench.measure import Measured
from flexq_bench.measure.device_lock import devices_alone
from flexq_bench.runs.lifecycle import open_run
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import operation

OK = Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50)


def of_gpus(gpus, elements=1024):
    workload = operation("all_reduce").workload(elements=elements, gpus=gpus)
    return Case("all-reduce", workload, stage="op")


def test_a_case_takes_the_gpus_of_its_parameter(a_case):
    assert (a_case().gpus, of_gpus(4).gpus) == (1, 4)


def test_cases_of_two_gpus_follow_those_of_one(table, gpus, a_case):
    alone, pairs = [a_case(m) for m in range(1, 6)], [of_gpus(2, n) for n in (64, 128, 256)]
    mixed = [case for two in zip(pairs, alone, strict=False) for case in two] + alone[3:]
    workers = gpus({"H200": 5})
    work = table.work("H200", mixed)

    coordinator = table.coordinator(workers)
    coordinator.carry_out([work])

    assert [case for _, case in workers.started if case.gpus == 2] == [
        case for _, case in workers.started[5:]
    ]
    assert workers.used == ["measure 2", "measure"]
    assert table.received(work) == sorted(case.key for case in mixed)
    assert len(coordinator.workers) == 5


def test_a_host_with_too_few_gpus_leaves_a_reason(table, gpus, a_case):
    work = table.work("H200", [a_case(1), of_gpus(4), of_gpus(2)])

    table.coordinator(gpus({"H200": 3})).carry_out([work])

    assert table.states(work) == {
        a_case(1).key: "done",
        of_gpus(2).key: "done",
        of_gpus(4).key: "no-device",
    }
    with table.database.session() as session:
        [job] = queries.jobs_of(session, work.run.info.uuid, states=("no-device",))
    assert job.reason == "no host with 4 H200 came within 3 s"


def test_drained_gpu_of_two_gets_no_case(table, database, gpus):
    pairs = [of_gpus(2, n) for n in (64, 128, 256)]
    work, used = table.work("H200", pairs), set()

    def script(member, case):
        used.add(member.places)
        return OK

    with database.session() as session:
        drain(session, "H200 1", reason="hot", person="Ada", at=datetime.now(UTC))

    table.coordinator(gpus({"H200": 4}, script)).carry_out([work])

    assert used == {("here", "H200 2", "H200 3")}
    assert table.received(work) == sorted(case.key for case in pairs)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))]
)
def test_any_mix_ends_with_results_or_reasons(table, gpus, a_case, seed):
    draw = random.Random(seed)
    kinds = {gpu: draw.randint(1, 5) for gpu in ("H200", "A100")}

    def script(member, case):
        if draw.random() < 0.2:
            return Lost(member.uuid, "its node is gone", blameless=True)
        return OK

    works = []
    for gpu in kinds:
        drawn = [of_gpus(g, 64 * n) if g > 1 else a_case(n) for n in range(1, 13)
                 for g in [draw.choice((1, 1, 2, 3, 4))]]  # fmt: skip
        works.append(table.work(gpu, drawn))

    table.coordinator(gpus(kinds, script)).carry_out(works)

    for work in works:
        for case in work.cases:
            fits = case.gpus <= kinds[work.gpu]
            assert table.states(work)[case.key] == ("done" if fits else "no-device")


def test_devices_held_in_any_order_do_not_deadlock(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_LOCKS", str(tmp_path))
    turns = []

    def hold(*uuids):
        for _ in range(20):
            with devices_alone(uuids, wait_s=30):
                turns.append(uuids)

    threads = [threading.Thread(target=hold, args=order) for order in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len(turns) == 40


def test_a_local_pool_holds_all_devices_of_its_largest_case(monkeypatch, a_case):
    class Info:
        def __init__(self, uuid):
            self.uuid = uuid

    asked = []
    monkeypatch.setattr(
        local, "device_infos", lambda *given: asked.append(given) or [Info("a"), Info("b")]
    )
    pool = LocalPool.__new__(LocalPool)
    pool._device = "cuda:1"

    assert pool._uuids([Work(None, "H200", [a_case(), of_gpus(2)])]) == ["a", "b"]
    assert asked == [("cuda:1", 2)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own pipes and deprecations
def test_ray_measures_cases_of_one_and_two_gpus(simulated, a_cluster, add_node, tmp_path, a_case):
    for kind, count in (("A100", 2), ("H200", 1)):
        add_node(a_cluster, kind, count)
    times = simulated.TIMES.__class__(
        **{**{f: getattr(simulated.TIMES, f) for f in simulated.TIMES.__slots__}, "device": 3}
    )
    cases = [of_gpus(2, 64), a_case(1), of_gpus(2, 128), a_case(2)]
    workers = RayWorkers(
        a_cluster.address, backend="cuda", seed=0, times=times, actor=simulated.simulated_gpu(0.01)
    )
    with (
        open_database(str(tmp_path / "flexq.sqlite")) as database,
        RayPool(database, workers, simulated.COMMIT, times).opened() as pool,
        ExitStack() as opened,
    ):
        kinds = [kind.gpu for kind in pool.kinds]
        runs = [
            opened.enter_context(open_run(database, run, simulated.COMMIT))
            for run in simulated.runs_of(kinds, cases)
        ]
        works = [Work(run, gpu, cases) for run, gpu in zip(runs, kinds, strict=True)]
        pool.measure(works, lambda record: None)
        with database.session() as session:
            states = {
                work.gpu: {
                    job.case_key: job.state for job in queries.jobs_of(session, work.run.info.uuid)
                }
                for work in works
            }

    assert set(states["A100"].values()) == {"done"}
    assert {states["H200"][case.key] for case in cases if case.gpus == 2} == {"no-device"}
    assert {states["H200"][case.key] for case in cases if case.gpus == 1} == {"done"}
