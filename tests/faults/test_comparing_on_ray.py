"""Nodes and coordinators that die or freeze while a night compares on a Ray cluster.

The nodes declare GPUs of two kinds, and their workers take their time and draw numbers.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Bench
from tests.faults.test_comparing import check
from tests.fleet.conftest import add_gpus, ray_cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # Ray's own pipes
KINDS = ("A100", "H200")
CASES, CANARIES, SECONDS = 40, 34, 0.12  # three jobs on each kind
SIMULATED = Path(__file__).parents[1] / "fleet" / "simulated_fleet.py"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")  # on a busy machine
    with ray_cluster(monkeypatch) as opened:
        yield opened


class Night:
    """Coordinators of one night in processes of their own."""

    def __init__(self, bench: Bench, cluster: Any) -> None:
        self.bench, self._cluster = bench, cluster
        self._logs = len(list(bench.folder.glob("night *.log")))

    def start(self) -> tuple[subprocess.Popen[str], Path]:
        self._logs += 1
        log = self.bench.folder / f"night {self._logs}.log"
        numbers = (str(CASES), str(SECONDS), f"{self.bench.run}={CANARIES}")
        command = (sys.executable, str(SIMULATED), self._cluster.address, self.bench.url, *numbers)
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
        return process, log

    def comparing(self) -> tuple[subprocess.Popen[str], Path]:
        """A coordinator that has stored some comparisons, by the round's seed."""
        process, log = self.start()
        count = random.Random(f"{self.bench.fault} {self.bench.seed}").randint(1, 3)
        self.bench.until(
            lambda: log.read_text().count("job ") >= count or process.poll() is not None, 300
        )
        return process, log

    def outcomes(self, log: Path) -> dict[str, str]:
        lines = [line.split() for line in log.read_text().splitlines()]
        return {words[0]: words[1] for words in lines if words and words[0] in KINDS}

    def end(self, process: subprocess.Popen[str], log: Path) -> dict[str, str]:
        assert process.wait(300) == 0, log.read_text()
        return self.outcomes(log)

    def completes(self, process: subprocess.Popen[str], log: Path) -> None:
        """Wait for its end; every kind is complete, and each comparison was judged once."""
        assert self.end(process, log) == dict.fromkeys(KINDS, "complete"), log.read_text()
        check(self.bench, kinds=len(KINDS), canaries=CANARIES)


@pytest.fixture
def night(bench: Bench, cluster: Any) -> Night:
    return Night(bench, cluster)


def processes_of(node: Any) -> dict[int, str]:
    """Command lines of a node's processes, by their ids."""
    found = {p.process.pid for ps in node.all_processes.values() for p in ps}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    names = {}
    for pid in found:
        with suppress(OSError):
            names[pid] = Path(f"/proc/{pid}/cmdline").read_text()
    return names


@contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    stopped = list(pids)
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_ray_node_killed(night, cluster):
    lost, _, _ = (add_gpus(cluster, kind, 1) for kind in ("A100", "A100", "H200"))
    running = night.comparing()
    cluster.remove_node(lost, allow_graceful=False)

    night.completes(*running)


def test_ray_node_frozen(night, cluster):
    node, _, _ = (add_gpus(cluster, kind, 1) for kind in ("A100", "A100", "H200"))
    running = night.comparing()
    with frozen(processes_of(node)):
        night.completes(*running)


def test_ray_worker_frozen(night, cluster):
    """Only the process that compares, so that its node stays alive."""
    node, _ = (add_gpus(cluster, kind, 1) for kind in KINDS)
    running = night.comparing()
    comparers = [pid for pid, name in processes_of(node).items() if "SimulatedComparer" in name]
    with frozen(comparers):
        night.completes(*running)


def test_ray_last_node_of_a_kind_lost_and_back(night, cluster):
    add_gpus(cluster, "H200", 1)
    lost = add_gpus(cluster, "A100", 1)
    running = night.comparing()
    cluster.remove_node(lost, allow_graceful=False)

    first = night.end(*running)
    add_gpus(cluster, "A100", 1)

    # With the last comparison stored before the loss, nothing is missing.
    assert first == {"A100": "incomplete", "H200": "complete"} or "incomplete" not in first.values()
    night.completes(*night.start())


def test_ray_coordinator_killed_another_takes_over(night, cluster):
    for kind in KINDS:
        add_gpus(cluster, kind, 1)
    first, _ = night.comparing()
    second = night.start()
    time.sleep(random.Random(night.bench.seed).uniform(0, 2))
    first.kill()
    first.wait()

    night.completes(*second)


def test_ray_two_coordinators(night, cluster):
    for kind in KINDS:
        add_gpus(cluster, kind, 1)
    running = [night.start() for _ in range(2)]

    for one in running:
        night.completes(*one)


def test_ray_head_node_restarted(bench, monkeypatch):
    """The night on the old cluster ends by itself; one on the new cluster carries on."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")  # else a minute
    with ray_cluster(monkeypatch) as old:
        for kind in KINDS:
            add_gpus(old, kind, 1)
        process, _ = Night(bench, old).comparing()
    process.wait(300)

    with ray_cluster(monkeypatch) as new:
        for kind in KINDS:
            add_gpus(new, kind, 1)
        again = Night(bench, new)
        again.completes(*again.start())
