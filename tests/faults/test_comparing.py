"""Kills and company while a night compares: each comparison is judged once, no night is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from flexq_bench.db.engine import BUSY_TIMEOUT_S
from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from tests.faults.conftest import Bench, count_round

pytestmark = pytest.mark.timeout(180)
CANARIES, WORKERS = 12, 6  # six jobs of two cases
NIGHT = {"cases": 13, "canaries": CANARIES, "workers": WORKERS, "seconds": 0.1}


def comparing(bench: Bench, **changes: object) -> tuple[int, Path]:
    """A coordinator that has stored some comparisons, by the round's seed."""
    pid, log = bench.start(**{**NIGHT, **changes})
    bench.until_stored(random.Random(f"{bench.fault} {bench.seed}").randint(1, 5), log)
    return pid, log


def finish(bench: Bench) -> None:
    """Go on as whoever reads `status` would."""
    pid, _ = bench.start(**NIGHT)
    assert bench.wait(pid) == ExitCode.PASS, bench.said()


def check(
    bench: Bench, *, kinds: int = 1, canaries: int = CANARIES, may_give_up: bool = False
) -> None:
    """The invariants, by SQL of their own: each planned comparison is judged once.

    may_give_up: or, after deaths of three workers, given up with a reason.
    """
    shown = f"sqlite:///{bench.direct}" if "://" not in bench.direct else bench.direct
    engine = create_engine(shown.replace("postgresql:", "postgresql+psycopg:"))
    night = "SELECT run_id FROM night WHERE name = :run"
    with engine.connect() as connection:

        def rows(question: str) -> list[tuple[object, ...]]:
            return [tuple(row) for row in connection.execute(text(question), {"run": bench.run})]

        jobs = rows(
            f"SELECT content, state, reason FROM job WHERE kind = 'compare' AND run_id IN ({night})"
        )
        states = rows("SELECT state, report FROM night WHERE name = :run")
        running = rows("SELECT uuid FROM run WHERE status = 'running' AND id IN "
                       f"({night})")  # fmt: skip
        series = rows(
            "SELECT decision.series_id FROM decision JOIN device ON device.id = decision.device_id "
            f"WHERE decision.id > {bench.decided} AND device.uuid IN (SELECT d.uuid "
            "FROM job JOIN worker w ON w.uuid = job.worker JOIN device d ON d.id = w.device_id "
            f"WHERE job.run_id IN ({night}))"
        )
    engine.dispose()
    parsed = [json.loads(c) if isinstance(c, str) else c for c, *_ in jobs]
    planned = sum(len(content["cases"]) for content in parsed)
    ends = ["done" if may_give_up and why and s == "quarantined" else s for _, s, why in jobs]
    given_up = sum(
        len(content["cases"])
        for content, (_, state, _), end in zip(parsed, jobs, ends, strict=True)
        if state != end
    )
    stuck = len(running) + sum(end != "done" for end in ends) + sum(
        state != "done" for state, _ in states
    )  # fmt: skip
    wanted, judged = planned - given_up, (len(series), len(set(series)))
    count_round(bench, planned=wanted, stored=judged[0], distinct=judged[1], stuck=stuck)
    said = bench.said()
    assert not re.search(r"unexpected \w+:|Traceback", said), said
    assert (planned, judged) == (kinds * canaries, (wanted, wanted)), said
    assert (stuck, len(states)) == (0, kinds), said


def test_comparing_coordinator_killed(bench):
    for _ in range(2):
        pid, _ = comparing(bench)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert bench.wait(pid) in (-signal.SIGKILL, ExitCode.PASS)
    finish(bench)

    check(bench)


def test_comparing_coordinator_stopped(bench):
    pid, _ = comparing(bench)
    os.kill(pid, signal.SIGTERM)

    assert bench.wait(pid) in (INTERRUPTED, ExitCode.PASS)
    finish(bench)
    check(bench)


def test_comparing_coordinator_frozen_another_takes_over(bench):
    """It goes on when the other one has judged the night, and stores nothing again."""
    pid, _ = comparing(bench)
    os.kill(pid, signal.SIGSTOP)
    other, _ = bench.start(**NIGHT)
    end = bench.wait(other)
    # Frozen within a transaction, it keeps the writer's lock: of PostgreSQL until the server ends
    # the transaction, of SQLite until it goes on.
    is_locked = end == ExitCode.INFRASTRUCTURE and "is locked" in bench.said()
    assert is_locked or end == ExitCode.PASS, bench.said()
    if is_locked and bench.kind == "postgresql":
        finish(bench)
    os.kill(pid, signal.SIGCONT)

    ends = {ExitCode.PASS} | ({ExitCode.INFRASTRUCTURE} if bench.kind == "postgresql" else set())
    assert bench.wait(pid) in ends, bench.said()
    check(bench)


def test_comparing_workers_die_and_hang(bench):
    pid, _ = bench.start(**NIGHT, deaths=0.1, hangs=0.02)

    assert bench.wait(pid) == ExitCode.PASS
    check(bench, may_give_up=True)


def test_comparing_two_coordinators(bench):
    pids = [bench.start(**NIGHT, busy_s=BUSY_TIMEOUT_S)[0] for _ in range(2)]

    # On a busy machine the server may not answer one of them within 2 s.
    ends = {bench.wait(pid) for pid in pids}
    assert ExitCode.PASS in ends, bench.said()
    assert ends <= {ExitCode.PASS, ExitCode.INFRASTRUCTURE}, bench.said()
    check(bench)


def test_comparing_two_coordinators_one_killed(bench):
    first = comparing(bench, busy_s=BUSY_TIMEOUT_S)
    second, _ = bench.start(**NIGHT, busy_s=BUSY_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.kill(first[0], signal.SIGKILL)

    bench.wait(first[0])
    assert bench.wait(second) == ExitCode.PASS, bench.said()
    check(bench)
