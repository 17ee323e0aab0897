"""What a worker does to its GPU: hang, break it, ask for too much. Real processes on a real GPU."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo, RunInfo
from flexq_bench.fleet import RayPool, RayWorkers, Times, Work
from flexq_bench.fleet.ray_workers import MeterActor
from flexq_bench.measure import Tuning
from flexq_bench.runs.lifecycle import open_run
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

pytestmark = pytest.mark.alone

pytest.importorskip("ray")

HANGS, BREAKS, TOO_LARGE = 1024, 1152, 1280  # by their N
COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
TIMES = Times(start=60, case=8, beat=1, lease=10, device=60, scan=2, database=60)


def sabotaged(mark):
    """A class of workers some of whose kernels misbehave; the one that hangs does so once.

    A class of its own each time, so that Ray carries it to its processes by value.
    """

    class Sabotaged(MeterActor):
        def measure(self, case, choices):
            prepare = self._meter._prepare

            def misbehave(kernel, case, shared):
                if case.gemm.n == HANGS and not mark.exists():
                    mark.touch()
                    torch.cuda._sleep(1 << 60)  # cycles: eighteen years
                    torch.cuda.synchronize()
                elif case.gemm.n == BREAKS:
                    torch.zeros(1, device="cuda")[torch.tensor([9], device="cuda")]
                    torch.cuda.synchronize()
                elif case.gemm.n == TOO_LARGE:
                    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
                return prepare(kernel, case, shared)

            self._meter._prepare = misbehave
            try:
                return super().measure(case, choices)
            finally:
                self._meter._prepare = prepare

    return Sabotaged


def test_hanging_broken_or_full_gpu_costs_one_case(tmp_path):
    if torch.cuda.is_initialized():
        pytest.skip("this process has a GPU, which a worker needs alone: run this file by itself")
    sizes = (896, HANGS, 1088, BREAKS, 1216, TOO_LARGE, 1344)
    cases = [Case("read-6", GemmWorkload(1, n, 4096)) for n in sizes]
    keys = tuple(case.key for case in cases)
    run = RunInfo("r", "faults", "manual", "running", "2026-01-01T00:00:00+00:00", "r", keys)
    workers = RayWorkers(
        "local",
        backend="cuda",
        seed=0,
        tuning=Tuning.NONE,
        times=TIMES,
        actor=sabotaged(tmp_path / "hung"),
    )

    found = {}
    with open_database(str(tmp_path / "flexq.sqlite")) as database:
        with (
            RayPool(database, workers, COMMIT, TIMES).opened() as pool,
            open_run(database, run, COMMIT) as opened,
        ):
            work = Work(opened, pool.kinds[0].gpu, cases)
            pool.measure([work], lambda record: found.setdefault(record.n, record))
        with database.session() as session:
            lost = {one.detail for one in queries.workers(session) if one.state == "lost"}
            assert len(list(queries.run_records(session, "r"))) == len(cases)

    statuses = {n: record.status for n, record in found.items()}
    assert statuses == dict.fromkeys(sizes, "ok") | {BREAKS: "failed", TOO_LARGE: "failed"}
    assert found[HANGS].extra["attempt"] == 2
    assert "CUDA error" in found[BREAKS].detail
    assert "out of memory" in found[TOO_LARGE].detail
    assert any("it hangs" in reason for reason in lost)
    assert any("stopped working" in reason for reason in lost)
