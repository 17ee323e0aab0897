"""Fleets that share a database; a Ray cluster whose workers stop and whose nodes come and go."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from flexq_bench.db.engine import BUSY_TIMEOUT_S
from flexq_bench.exit_codes import ExitCode
from tests.faults.conftest import Bench
from tests.faults.fleet_process import GPU, TIMES
from tests.faults.test_faults import under_way
from tests.fleet.conftest import add_gpus, ray_cluster

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # Ray's own pipes and deprecations
]


def test_two_fleets_on_one_database(bench: Bench) -> None:
    """One is stopped until the other takes its workers for dead, the other is killed meanwhile."""
    other = replace(bench, run=str(uuid.uuid4()))
    first, _ = under_way(bench, seconds=0.1, busy_s=BUSY_TIMEOUT_S)
    os.kill(first, signal.SIGSTOP)
    try:
        time.sleep(2 * TIMES.lease + 0.5)
        second, _ = under_way(other, busy_s=BUSY_TIMEOUT_S)
        os.kill(second, signal.SIGKILL)
        bench.wait(second)
    finally:
        os.kill(first, signal.SIGCONT)
    other.finish()

    assert bench.wait(first) == ExitCode.PASS, bench.said()
    bench.check()
    other.check()


@dataclass
class Cluster:
    """A Ray cluster of two nodes with one simulated GPU each."""

    ray: Any
    nodes: list[Any]

    def lose_a_node(self) -> None:
        self.ray.remove_node(self.nodes.pop(0), allow_graceful=False)

    def add_node(self) -> None:
        self.nodes.append(add_gpus(self.ray, GPU, 1))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch) as ray:
        made = Cluster(ray, [])
        made.add_node()
        made.add_node()
        yield made


@pytest.fixture
def on_ray(bench: Bench, cluster: Cluster) -> Bench:
    bench.cluster = cluster.ray.address
    bench.begins_within_s = 240.0  # actors import torch
    return bench


def test_ray_worker_is_stopped(on_ray: Bench) -> None:
    pid, _ = under_way(on_ray, seconds=0.2)
    os.kill(a_worker(on_ray), signal.SIGSTOP)

    assert on_ray.wait(pid) == ExitCode.PASS, on_ray.said()
    on_ray.check()


def a_worker(bench: Bench) -> int:
    shown = bench.direct.replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(shown if "://" in shown else f"sqlite:///{shown}")
    with engine.connect() as connection:
        newest = "SELECT pid FROM worker ORDER BY id DESC LIMIT 2"
        pids = [pid for (pid,) in connection.execute(text(newest))]
    engine.dispose()
    return random.Random(bench.seed).choice(pids)


def test_ray_node_is_lost_and_returns(on_ray: Bench, cluster: Cluster) -> None:
    pid, log = under_way(on_ray, seconds=0.2)
    cluster.lose_a_node()
    time.sleep(random.Random(on_ray.seed).uniform(0, 4))
    cluster.add_node()

    assert on_ray.wait(pid) == ExitCode.PASS, on_ray.said()
    assert "is lost" in log.read_text() or "done" in log.read_text()
    on_ray.check()


def test_ray_of_another_version(on_ray: Bench) -> None:
    """A coordinator that the cluster refuses says both versions, and disturbs no other."""
    pid, log = under_way(on_ray, seconds=0.1)
    order = on_ray.order(ray_version="2.1.0", log=str(on_ray.folder / "refused"))
    refused = on_ray.launcher.start(order)
    assert on_ray.wait(refused) == ExitCode.INFRASTRUCTURE
    said = (on_ray.folder / "refused").read_text()
    assert "2.1.0" in said, said
    assert "Traceback" not in said

    assert on_ray.wait(pid) == ExitCode.PASS, log.read_text()
    on_ray.check()
