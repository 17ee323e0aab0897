"""Final status of runs that end normally, by an error or by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexq_bench import interrupts
from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.records import ResultOrigin, execute
from flexq_bench.ci.nightly import Rules, measure_night
from flexq_bench.cli.app import main
from flexq_bench.db import queries
from flexq_bench.db.records import DeviceInfo
from flexq_bench.decode import measurement
from flexq_bench.errors import CancelledError, InfrastructureError, UsageError
from flexq_bench.fleet.pool import Kind
from flexq_bench.fleet.ray_pool import RayPool
from flexq_bench.fleet.request_worker import serve_next
from flexq_bench.fleet.requests import submit, sweep_request
from flexq_bench.fleet.suite_runs import measure_runs, plan_runs
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Joined, ReadyWorker
from flexq_bench.runs.lifecycle import new_run, open_run
from flexq_bench.sweeps.sweep import Sweep
from flexq_bench.workloads.suite import Group, Shape, Suite

SHAPES = (Shape(256, 256, "o_proj"),)
SMALL = Suite("made", "", "", (Group(("flexq-w6a6",), (1,), SHAPES),))


def raising(error):
    def end():
        raise error

    return end


@pytest.fixture(autouse=True)
def no_ignored_signals():
    """A test run below `nohup` would ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def signalled(number):
    def end():
        os.kill(os.getpid(), number)
        raise AssertionError(f"{number.name} did not end it")

    return end


ENDS = {
    "Ctrl-C": (raising(KeyboardInterrupt()), "interrupted"),
    "SIGTERM": (signalled(signal.SIGTERM), "interrupted"),
    "SIGHUP": (signalled(signal.SIGHUP), "interrupted"),
    "the work is taken back": (raising(CancelledError("taken back")), "interrupted"),
    "the reader's end of the pipe is closed": (raising(BrokenPipeError()), "interrupted"),
    "SystemExit": (raising(SystemExit(1)), "interrupted"),
    "the generator is closed": (raising(GeneratorExit()), "interrupted"),
    "the device fails": (raising(InfrastructureError("gone")), "failed"),
    "the options don't fit": (raising(UsageError("drop one")), "failed"),
    "a defect": (raising(ZeroDivisionError()), "failed"),
    "no memory": (raising(MemoryError()), "failed"),
}


class OneWorker:
    """Workers of a cluster: one, that ends as `end` says when it is to measure."""

    backend, refusals, arriving = "cpu", (), 0

    def __init__(self, worker, end):
        self._events, self._end = [Joined(ReadyWorker("w", worker))], end

    def poll(self, timeout_s):
        events, self._events = self._events, []
        return events

    def start(self, worker, case, choices):
        self._end()

    def memory_obstacles(self, worker, cases):
        return {}


class OneKind:
    """A pool that ends as `end` says when it is to measure."""

    kinds = (Kind("A CPU", "cpu", None),)

    def __init__(self, end):
        self._end = end

    def measure(self, works, on_record):
        self._end()


def measured_on(pool, where):
    planned = plan_runs(pool, SMALL, (), "manual")
    measure_runs(where.database, pool, planned, where.commit, lambda record: None)


def measured_here(where, end):
    measured_on(where.pool(lambda case: end()), where)


def measured_on_a_cluster(where, end):
    pool = RayPool(where.database, OneWorker(where.worker, end), where.commit, Times())
    pool.gather()
    measured_on(pool, where)


def measured_by_a_nightly_run(where, end):
    rules = Rules("2025-11-01", None)
    measure_night(
        where.database,
        OneKind(end),
        SMALL,
        where.commit,
        rules,
        progress=lambda total: nullcontext(lambda record: None),
    )


def measured_for_a_request(where, end):
    with where.database.session() as session:
        sweep = Sweep(("flexq-w6a6",), (1,), SHAPES)
        submit(session, sweep_request(session, sweep, requester="ada", backend="cpu"))
    pool = where.pool(lambda case: end())
    how = {"on_record": lambda record: None, "search": None}
    serve_next(where.database, pool, *pool.kinds, where.commit, "me", **how)


def evaluated(where, end):
    origin = ResultOrigin(
        "tiny", "a" * 64, 0, new_run(SUITE, "manual", ()), where.commit, where.worker.device, {}
    )
    evaluator = SimpleNamespace(parameters=lambda *unit: {}, evaluate=lambda *unit: end())
    execute(
        where.database, evaluator, [("w6a6", "piqa")], origin, on_unit=lambda unit, findings: None
    )


def decoded(where, end):
    def decode_all(*given):
        end()
        yield from ()

    where.patch.setattr(measurement, "decode_all", decode_all)
    main(["decode", "llama-7b", "--backend", "cpu", "--db", str(where.database.path)])


USERS = (
    measured_here,
    measured_on_a_cluster,
    measured_by_a_nightly_run,
    measured_for_a_request,
    evaluated,
    decoded,
)


@pytest.fixture
def where(database, commit, a_pool, monkeypatch):
    worker = SimpleNamespace(
        device=DeviceInfo("CPU-1", "A CPU", "cpu"), environment={}, capability=None, pid=1
    )
    monkeypatch.setattr(interrupts, "_received", False)
    return SimpleNamespace(
        database=database,
        commit=commit,
        worker=worker,
        pool=a_pool,
        patch=monkeypatch,
    )


def statuses(database) -> Sequence[str]:
    with database.session() as session:
        return [run.status for run in queries.runs(session)]


@pytest.mark.parametrize(
    ("name", "user"),
    [
        pytest.param(
            *(name, user),
            id=f"{name}-{user.__name__}",
            # Each end once, and each user.
            marks=() if i % len(USERS) == j else pytest.mark.slow,
        )
        for i, name in enumerate(ENDS)
        for j, user in enumerate(USERS)
    ],
)
def test_run_has_the_status_of_its_end(where, user, name):
    end, status = ENDS[name]

    with suppress(BaseException):
        user(where, end)

    assert statuses(where.database) == [status]


def test_second_interrupt_keeps_the_final_status(where, monkeypatch):
    from flexq_bench.runs import lifecycle

    real, calls = lifecycle.finish_run, []

    def interrupted_once(*given):
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(*given)

    monkeypatch.setattr(lifecycle, "finish_run", interrupted_once)

    with (
        pytest.raises(KeyboardInterrupt),
        open_run(where.database, new_run("smoke", "manual", ()), where.commit),
    ):
        raise KeyboardInterrupt

    assert statuses(where.database) == ["interrupted"]


def test_run_left_running_is_resumed(where):
    """As a process that was killed leaves it, or an earlier version that heard a broken pipe."""
    from flexq_bench.db.store import begin_run

    run = new_run("smoke", "manual", ())
    with where.database.session() as session:
        begin_run(session, run, where.commit)
    assert statuses(where.database) == ["running"]

    with open_run(where.database, run, where.commit) as opened:
        assert opened.info.uuid == run.uuid

    assert statuses(where.database) == ["complete"]
    assert Path(where.database.path).is_file()


def test_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.ended_by_terminate():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
