"""Nodes and coordinators that die or freeze while a night compares on a Ray cluster.

The nodes declare GPUs of two kinds, and their workers take their time and draw numbers.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Bench
from tests.faults.test_comparing import check
from tests.fleet.conftest import add_gpus, ray_cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # Ray's own pipes
KINDS = ("A100", "H200")
CASES, CANARIES, SECONDS = 40, 34, 0.1  # three jobs on each kind


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # on a busy machine
        with ray_cluster(patch) as opened:
            yield opened


class Nodes:
    """The nodes of a cluster, a GPU each. Those that a round leaves intact serve the next."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self._of_kind: dict[str, list[Any]] = {kind: [] for kind in KINDS}

    def have(self, *kinds: str) -> None:
        """Add and remove nodes until there is one for each of these kinds."""
        for kind, nodes in self._of_kind.items():
            while len(nodes) > kinds.count(kind):
                self.remove(nodes[-1])
            while len(nodes) < kinds.count(kind):
                nodes.append(add_gpus(self.cluster, kind, 1))

    def first(self, kind: str) -> Any:
        return self._of_kind[kind][0]

    def remove(self, node: Any) -> None:
        """Kill a node."""
        for nodes in self._of_kind.values():
            if node in nodes:
                nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    @contextmanager
    def frozen(self, node: Any, only: str = "") -> Iterator[None]:
        """Stop a node's processes, or those of this name, for a block; then kill the node."""
        stopped = [pid for pid, name in processes_of(node).items() if only in name]
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self.remove(node)


@pytest.fixture(scope="module")
def nodes(running_cluster: Any) -> Nodes:
    return Nodes(running_cluster)


class Night:
    """Coordinators of one night in processes of their own."""

    def __init__(self, bench: Bench, cluster: Any) -> None:
        self.bench, self._cluster = bench, cluster

    def start(self) -> tuple[int, Path]:
        """Start a coordinator; return its process and its log."""
        numbers = (str(CASES), str(SECONDS), f"{self.bench.run}={CANARIES}")
        words = (self._cluster.address, self.bench.url, *numbers)
        ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        return self.bench.start(words=words, environment=ray)

    def comparing(self) -> tuple[int, Path]:
        """A coordinator that has stored some comparisons, and compares, by the round's seed."""
        pid, log = self.start()
        draw = random.Random(f"{self.bench.fault} {self.bench.seed}")
        count = draw.randint(1, 3)
        self.bench.until(lambda: log.read_text().count(" job ") >= count or has_ended(pid), 300)
        time.sleep(draw.uniform(0, SECONDS * CANARIES / 3))  # of a job
        return pid, log

    def outcomes(self, log: Path) -> dict[str, str]:
        lines = [line.split()[1:] for line in log.read_text().splitlines()]
        of_kinds = [words for words in lines if words and words[0] in KINDS]
        return {kind: outcome for kind, outcome, *_ in of_kinds if outcome != "on"}  # "on node N"

    def end(self, pid: int, log: Path) -> dict[str, str]:
        assert self.bench.wait(pid) == 0, log.read_text()
        return self.outcomes(log)

    def completes(self, *coordinators: tuple[int, Path]) -> None:
        """Wait for their ends; every kind is complete, and each comparison was judged once."""
        for pid, log in coordinators:
            assert self.end(pid, log) == dict.fromkeys(KINDS, "complete"), log.read_text()
        check(self.bench, kinds=len(KINDS), canaries=CANARIES)


def has_ended(pid: int) -> bool:
    """Return True for a process that ended and was not waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def night(bench: Bench, running_cluster: Any) -> Night:
    return Night(bench, running_cluster)


def processes_of(node: Any) -> dict[int, str]:
    """Command lines of a node's processes, by their ids."""
    found = {p.process.pid for ps in node.all_processes.values() for p in ps}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    names = {}
    for pid in found:
        with suppress(OSError):
            names[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return names


def test_ray_node_killed(night, nodes):
    nodes.have("A100", "A100", "H200")
    running = night.comparing()
    nodes.remove(nodes.first("A100"))

    night.completes(running)


def test_ray_node_frozen(night, nodes):
    nodes.have("A100", "A100", "H200")
    running = night.comparing()
    with nodes.frozen(nodes.first("A100")):
        night.completes(running)


def test_ray_worker_frozen(night, nodes):
    """Only the process that compares, so that its node stays alive."""
    nodes.have(*KINDS)
    running = night.comparing()
    with nodes.frozen(nodes.first("A100"), only="SimulatedComparer"):
        night.completes(running)


def test_ray_last_node_of_a_kind_lost_and_back(night, nodes):
    nodes.have(*KINDS)
    running = night.comparing()
    nodes.remove(nodes.first("A100"))

    first = night.end(*running)
    nodes.have(*KINDS)

    # With the last comparison stored before the loss, nothing is missing.
    assert first == {"A100": "incomplete", "H200": "complete"} or "incomplete" not in first.values()
    night.completes(night.start())


def test_ray_coordinator_killed_another_takes_over(night, nodes):
    nodes.have(*KINDS)
    first, _ = night.comparing()
    second = night.start()
    time.sleep(random.Random(night.bench.seed).uniform(0, 2))
    os.kill(first, signal.SIGKILL)
    night.bench.wait(first)

    night.completes(second)


def test_ray_two_coordinators(night, nodes):
    nodes.have(*KINDS)
    night.completes(*[night.start() for _ in range(2)])


def test_ray_head_node_restarted(bench, monkeypatch):
    """The night on the old cluster ends by itself; one on the new cluster carries on."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")  # else a minute
    with ray_cluster(monkeypatch) as old:
        for kind in KINDS:
            add_gpus(old, kind, 1)
        pid, _ = Night(bench, old).comparing()
    bench.wait(pid)

    with ray_cluster(monkeypatch) as new:
        for kind in KINDS:
            add_gpus(new, kind, 1)
        again = Night(bench, new)
        again.completes(again.start())
