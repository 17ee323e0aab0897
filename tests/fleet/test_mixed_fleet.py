"""A Ray cluster of simulated GPUs in which workers, nodes and coordinators are killed."""

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

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own pipes and deprecations


class Fleet:
    """A coordinator in a process of its own, for so many cases on each of some kinds."""

    def __init__(self, simulated, cluster, path, kinds, cases, seconds):
        numbers = (str(cases), str(seconds))
        self._command = [
            sys.executable, simulated.__file__, cluster.address, str(path), *numbers, *kinds
        ]  # fmt: skip
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def kill(self):
        self.process.kill()
        self.process.communicate()


def live_workers(path):
    with open_database(str(path)) as database, database.session() as session:
        return queries.workers(session, live=True)


def done(path):
    with open_database(str(path)) as database, database.session() as session:
        return sum(run.states.get("done", 0) for run in queries.progress(session))


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


def check_nothing_lost_nor_doubled(path, kinds, cases):
    with open_database(str(path)) as database, database.session() as session:
        results = Counter()
        for run in queries.runs(session):
            assert run.status == "complete"
            [progress] = queries.progress(session, run_uuids=[run.uuid])
            records = list(queries.run_records(session, run.uuid))
            results.update(record.gpu for record in records)
            planned = queries.run_info(session, run.uuid).plan
            assert sorted(record.case for record in records) == sorted(planned)
            by_status = Counter(record.status for record in records)
            # A case that three kills happened to hit has its reason as its result.
            assert by_status["ok"] == progress.states["done"]
            assert by_status["failed"] == progress.states.get("quarantined", 0)
    assert results == dict.fromkeys(kinds, cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_1000_cases_survive_all_kinds_of_kills(simulated, a_cluster, add_node, tmp_path):
    kinds = ("GeForce-RTX-3090-Ti", "RTX-A6000", "A100", "H200")
    nodes = {kind: add_node(a_cluster, kind) for kind in kinds}
    path, chance, began = tmp_path / "flexq.sqlite", random.Random(0), time.monotonic()
    fleet = Fleet(simulated, a_cluster, path, kinds, 250, 0.5)
    wait_for(lambda: path.exists() and done(path) > 10)
    events = iter(
        [
            lambda: a_cluster.remove_node(nodes["RTX-A6000"]),
            fleet.kill,
            lambda: hold(path, 30),
            lambda: add_node(a_cluster, "RTX-A6000"),
            fleet.kill,
        ]
    )
    next_kill = next_event = time.monotonic() + 5
    while fleet.process.poll() is None or fleet.process.returncode < 0:
        if fleet.process.poll() is not None:
            fleet.start()
        if time.monotonic() >= next_kill:
            kill_a_worker(path, chance)
            next_kill = time.monotonic() + 5
        if time.monotonic() >= next_event:
            next(events, lambda: None)()
            next_event = time.monotonic() + 12
        assert time.monotonic() - began < 800
        time.sleep(0.2)

    assert fleet.process.returncode == 0, fleet.process.stderr.read()
    assert next(events, None) is None
    check_nothing_lost_nor_doubled(path, kinds, 250)


def hold(path, seconds):
    """Lock the database exclusively for some seconds."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.execute("BEGIN EXCLUSIVE")
    time.sleep(seconds)
    connection.rollback()
    connection.close()
