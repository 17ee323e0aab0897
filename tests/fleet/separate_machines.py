"""Nodes of a Ray cluster on this host that have no file in common with the coordinator.

Each node has namespaces of its own: another host name, a CPU of another name, other folders for its
home and temporary files, another one at the same path for its cache, and none of the folders that
are hidden from it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flexq_bench.fleet.ray_cluster import _QUIET

# Ray gives up on its own processes after 30 s, which a busy machine exceeds: here after 300 s.
PATIENT_RAY = """
import sys, time, types
import ray._private.node as node
node.time = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / 10})
from ray.scripts.scripts import main
sys.exit(main())
"""
_ALONE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_ROOT = Path(__file__).parents[2]
_HEAD = "127.0.0.2"  # Ray replaces 127.0.0.1 by an address that is reachable from outside
_SMALL = ("--object-store-memory", str(100 << 20), "--disable-usage-stats")


def can_separate() -> bool:
    """Return True if this user may make such nodes."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run((*_ALONE, "true"), capture_output=True, check=False).returncode == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind((_HEAD, 0))
        return int(free.getsockname()[1])


@dataclass
class Machines:
    """A head node without devices, and nodes that are added."""

    folder: Path
    hidden: Sequence[Path]
    port: int
    client_port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The address for a coordinator, which is on no node."""
        return f"ray://{_HEAD}:{self.client_port}"

    def start_head(self) -> None:
        ports = (f"--port={self.port}", f"--ray-client-server-port={self.client_port}")
        options = ("--head", *ports, "--num-cpus=0", "--include-dashboard=false")
        self._start("head", _HEAD, options)

    def add(self, name: str, cpu: str) -> None:
        """Add a node with a CPU of this name."""
        address = f"127.0.0.{10 + len(self.processes)}"
        self._start(name, address, (f"--address={_HEAD}:{self.port}", "--num-cpus=1"), cpu=cpu)

    def wait_for_nodes(self) -> None:
        """Wait until a client can be served and sees all nodes, on a busy machine for minutes."""
        count = f"sum(node['Alive'] for node in ray.nodes()) - {len(self.processes)}"
        asks = f"import ray, sys; ray.init('{self.address}'); sys.exit({count})"
        give_up = time.monotonic() + 600
        while True:
            done = subprocess.run(
                (sys.executable, "-c", asks),
                env={**os.environ, **_QUIET},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return
            assert time.monotonic() < give_up, done.stderr
            time.sleep(1)

    def kill(self, name: str) -> None:
        """End all processes of a node at once."""
        process = self.processes.pop(name)
        process.kill()  # with it ends the first process of its namespace, and so all of them
        process.wait()

    def _start(self, name: str, address: str, options: Sequence[str], *, cpu: str = "") -> None:
        home = self.folder / name
        for part in ("home", "cache", "tmp", "locks"):
            (home / part).mkdir(parents=True)
        (home / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: {cpu}\n")
        hidden = [*self.hidden, *(self.folder / other for other in self.processes)]
        cache = self.folder / "cache"
        cache.mkdir(exist_ok=True)
        hide = [f"mount -t tmpfs none {shlex.quote(str(path))}" for path in hidden]
        named = f"mount --bind {home}/cpuinfo /proc/cpuinfo"
        ray = shlex.join(
            (
                sys.executable,
                "-c",
                PATIENT_RAY,
                "start",
                f"--node-ip-address={address}",
                *options,
                *_SMALL,
            )
        )
        own_cache = f"mount --bind {home}/cache {cache}"
        steps = [f"hostname {name}", own_cache, *hide, *([named] if cpu else ())]
        ours = ("FLEXQ_BENCH", "RAY_")
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
        paths = inherited.pop("PYTHONPATH", "").split(os.pathsep)
        installed = [path for path in paths if path and Path(path) != _ROOT]
        own = {
            "HOME": str(home / "home"),
            "PYTHONPATH": os.pathsep.join(installed),
            "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "180",  # on a busy machine
            "TMPDIR": str(home / "tmp"),
            "FLEXQ_BENCH_CACHE": str(cache),
            "FLEXQ_BENCH_LOCKS": str(home / "locks"),
        }
        with (home / "log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                (*_ALONE, "sh", "-ec", " && ".join([*steps, f"cd / && exec {ray} --block"])),
                env={**inherited, **_QUIET, **own},
                stdout=log,
                stderr=log,
            )


@contextmanager
def machines(folder: Path, hidden: Sequence[Path]) -> Iterator[Machines]:
    """A head node; others are added. hidden: folders that the nodes don't have."""
    made = Machines(folder, hidden, free_port(), free_port())
    try:
        made.start_head()
        _wait_for(made.client_port)
        yield made
    finally:
        for name in list(made.processes):
            made.kill(name)


def _wait_for(port: int) -> None:
    give_up = time.monotonic() + 600  # a busy machine
    while True:
        try:
            socket.create_connection((_HEAD, port), 1).close()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)
        else:
            return
