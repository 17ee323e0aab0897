"""A real Ray cluster of simulated GPUs, in which everything that can be killed is killed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

import pytest

from db import queries
from db.engine import open_database

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own pipes and deprecations


def start(simulated, cluster, path, cases, seconds):
    return subprocess.Popen(
        [sys.executable, simulated.__file__, cluster.address, str(path), str(cases), str(seconds)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def live_workers(path):
    with open_database(str(path)) as database, database.session() as session:
        return queries.workers(session, live=True)


def done(path):
    with open_database(str(path)) as database, database.session() as session:
        return sum(one.states.get("done", 0) for one in queries.progress(session))


def wait_for(condition, timeout_s=60):
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.2)


def kill_a_worker(path, chance):
    workers = live_workers(path)
    if workers:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(workers).pid, signal.SIGKILL)


def check_nothing_lost_nor_doubled(simulated, path, cases):
    with open_database(str(path)) as database, database.session() as session:
        results = Counter()
        for run in queries.runs(session):
            assert run.status == "complete"
            [progress] = queries.progress(session, run_uuids=[run.uuid])
            records = list(queries.run_records(session, run.uuid))
            results.update(record.gpu for record in records)
            assert sorted(r.case for r in records) == sorted(
                queries.run_info(session, run.uuid).plan
            )
            by_status = Counter(record.status for record in records)
            # A case that three kills happened to hit has its reason as its result.
            assert by_status["ok"] == progress.states["done"]
            assert by_status["failed"] == progress.states.get("quarantined", 0)
    assert results == {
        kind: cases // 3 + (number < cases % 3) for number, kind in enumerate(simulated.KINDS)
    }


def test_a_mixed_fleet_loses_nothing_when_a_worker_and_its_coordinator_are_killed(
    simulated, mixed_cluster, tmp_path
):
    cluster, _ = mixed_cluster
    path = tmp_path / "flexq.sqlite"
    first = start(simulated, cluster, path, 150, 0.05)
    wait_for(lambda: path.exists() and live_workers(path) and done(path) > 5)
    kill_a_worker(path, random.Random(0))
    wait_for(lambda: done(path) > 40)
    first.kill()
    first.wait()

    second = start(simulated, cluster, path, 150, 0.05)
    _, errors = second.communicate(timeout=120)

    assert second.returncode == 0, errors
    check_nothing_lost_nor_doubled(simulated, path, 150)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_1000_cases_survive_workers_nodes_coordinators_and_the_database(
    simulated, mixed_cluster, add_node, tmp_path
):
    cluster, nodes = mixed_cluster
    path, chance, began = tmp_path / "flexq.sqlite", random.Random(0), time.monotonic()
    coordinator = start(simulated, cluster, path, 1000, 0.4)
    wait_for(lambda: path.exists() and done(path) > 10)
    events = iter(
        [
            lambda: cluster.remove_node(nodes["RTX-A6000"]),
            lambda: coordinator.kill(),
            lambda: hold(path, 30),
            lambda: add_node(cluster, "RTX-A6000"),
            lambda: coordinator.kill(),
        ]
    )
    next_kill = next_event = time.monotonic() + 5
    while coordinator.poll() is None or coordinator.returncode < 0:
        if coordinator.poll() is not None:
            coordinator = start(simulated, cluster, path, 1000, 0.4)
        if time.monotonic() >= next_kill:
            kill_a_worker(path, chance)
            next_kill = time.monotonic() + 5
        if time.monotonic() >= next_event:
            next(events, lambda: None)()
            next_event = time.monotonic() + 12
        assert time.monotonic() - began < 800
        time.sleep(0.2)

    assert coordinator.returncode == 0, coordinator.stderr.read()
    assert next(events, None) is None
    check_nothing_lost_nor_doubled(simulated, path, 1000)


def hold(path, seconds):
    """Nobody else can read or write the database meanwhile."""
    held = sqlite3.connect(path, isolation_level=None, timeout=30)
    held.execute("BEGIN EXCLUSIVE")
    time.sleep(seconds)
    held.rollback()
    held.close()
