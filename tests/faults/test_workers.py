"""Worker processes that hang, are stopped or run out of memory; kernels, caches and worktrees."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.runtime import nvrtc
from flexq_bench.kernels.runtime.nvrtc import Build, compile_build
from flexq_bench.measure.program import WORKER as MODULE
from tests.faults.conftest import OURS, ROOT, path_with_ours

pytestmark = pytest.mark.timeout(300)

KERNELS = """
import ctypes, mmap, os, re, signal, threading, time
from flexq_bench.api import linear_kernel


def kernel(name):
    return linear_kernel(name, weight="fp16", backends=["cpu"])


@kernel("good")
def good(x, w, out):
    out.copy_(x.float() @ w.float().T)


@kernel("bad")
def bad(x, w, out):
    {bad}
"""
HANGS = {
    "a loop": "while True: pass",
    "a sleep that signals don't end": "[time.sleep(1) for _ in range(10**9)]",
    "a call that holds the interpreter": "re.match('(a+)+$', 'a' * 64 + 'b')",
    "a lock": "threading.Lock().__enter__(), (lock := threading.Lock()).acquire(), lock.acquire()",
    "a stopped process": "os.kill(os.getpid(), signal.SIGSTOP)",
    "a deaf process": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)), time.sleep(10**6)",
}
# Shared memory, which no limit of a process counts.
TAKES_MEMORY = (
    "shared = mmap.mmap(-1, 4 << 30); [shared.write(bytes(1 << 20)) for _ in range(4096)]"
)
BUSY = "not judged, measure it again when the CPUs are less busy"  # rounds run beside each other
SHAPE = ("--m", "1,2", "--n", "32", "--k", "32", "--backend", "cpu")


class Sweep:
    """`flexq-bench sweep` of a good and a bad kernel in a process of its own."""

    def __init__(self, folder: Path, database: str, before: tuple[str, ...] = ()) -> None:
        self._folder, self._database, self._before = folder, database, before

    def start(self, bad: str) -> subprocess.Popen[str]:
        path = self._folder / "mine.py"
        path.write_text(KERNELS.replace("{bad}", bad))
        words = ("sweep", "--kernels-from", str(path), "--kernels", "mine.*", *SHAPE)
        times = ("--times", "case=15,start=120", "--db", self._database)
        command = (sys.executable, "-m", "flexq_bench", *words, *times)
        own = {"PYTHONPATH": path_with_ours(), "FLEXQ_BENCH_CACHE": str(self._folder / "cache")}
        return subprocess.Popen(
            (*self._before, *command), cwd=self._folder, env=os.environ | own, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def check(self, code: int, said: str, *, failed: int) -> None:
        """Every case has one result, `failed` of them failed, and no process is left."""
        url = self._database
        engine = create_engine(
            url.replace("postgresql:", "postgresql+psycopg:")
            if "://" in url
            else f"sqlite:///{url}"
        )
        with engine.connect() as connection:
            newest = "(SELECT max(id) FROM run)"
            stored = connection.execute(
                text(f"SELECT case_key, status, detail FROM measurement WHERE run_id = {newest}")
            ).all()
            planned = connection.execute(
                text(f"SELECT count(*) FROM planned_case WHERE run_id = {newest}")
            ).scalar_one()
            status = connection.execute(
                text(f"SELECT status FROM run WHERE id = {newest}")
            ).scalar_one()
        engine.dispose()
        assert "Traceback" not in said, said
        assert (len(stored), status) == (planned, "complete"), said
        by_kernel = Counter(
            (key.split()[0], state == "failed" and BUSY not in (detail or ""))
            for key, state, detail in stored
        )
        assert by_kernel["mine.good", False] == 2, (stored, said)
        assert by_kernel["mine.bad", True] == failed, (stored, said)
        assert code == (ExitCode.INFRASTRUCTURE if failed else ExitCode.PASS), said
        assert processes_in(self._folder) == []


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes with this folder in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "sqlite":
        return str(tmp_path / "flexq.sqlite")
    url: str = request.getfixturevalue("server").url(OURS)
    return url


def test_kernel_hangs(place: str, round_seed: int, tmp_path: Path) -> None:
    how = [*HANGS.values()][round_seed % len(HANGS)]
    sweep = Sweep(tmp_path, place)

    process = sweep.start(how)
    said = process.communicate()[0]

    sweep.check(process.returncode, said, failed=2)
    assert "gave no answer to 'place' in 15 s and was ended" in said or "ok" in said


def test_worker_is_stopped(place: str, round_seed: int, tmp_path: Path) -> None:
    """SIGSTOP while it starts or measures: a case fails, and a new process has the others."""
    sweep, chance = Sweep(tmp_path, place), random.Random(f"stop {round_seed}")
    process = sweep.start("good(x, w, out)")
    worker = until(lambda: children_of(process.pid), process)
    time.sleep(chance.uniform(0, 4))
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGSTOP)

    said = process.communicate()[0]

    assert "Traceback" not in said, said
    assert processes_in(tmp_path) == []
    assert process.returncode in (ExitCode.PASS, ExitCode.INFRASTRUCTURE), said


def until(found: Callable[[], list[int]], process: subprocess.Popen[str]) -> int:
    while not (pids := found()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return pids[0]


def children_of(pid: int) -> list[int]:
    """Processes that measure: started by this one, or forked by the server that it started."""
    children = started_by(pid)
    forked = [one for child in children if runs(child, "fork_server") for one in started_by(child)]
    return [child for child in children if runs(child, MODULE)] or forked


def started_by(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in of_process(task).split()]


def runs(pid: int, name: str) -> bool:
    return name in of_process(Path(f"/proc/{pid}/cmdline"))


def of_process(file: Path) -> str:
    """The text of a file in /proc; empty: the process, as git's, has just ended."""
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""


@pytest.fixture
def little_memory() -> Iterator[tuple[str, ...]]:
    """Words before a command that put it into a control group of 1.5 GB without swap."""
    version_1, version_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    name, limit = f"flexq-faults-{os.getpid()}", 3 << 29
    group = (version_1 if version_1.is_dir() else version_2) / name
    try:
        group.mkdir()
        (
            group / "memory.limit_in_bytes" if version_1.is_dir() else group / "memory.max"
        ).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error.strerror}")
    yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    group.rmdir()


def test_kernel_takes_all_memory(
    place: str, tmp_path: Path, little_memory: tuple[str, ...]
) -> None:
    """The kernel of the system kills the largest process, which is the worker."""
    sweep = Sweep(tmp_path, place, little_memory)

    process = sweep.start(TAKES_MEMORY)
    said = process.communicate()[0]

    sweep.check(process.returncode, said, failed=2)
    assert "signal 9" in said or "memory" in said, said


def spoil(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    ways: tuple[Callable[[], object], ...] = (
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(content[: chance.randrange(len(content))]),
        lambda: path.write_bytes(chance.randbytes(len(content))),
        lambda: path.write_bytes(content + b"\0"),
        lambda: (path.unlink(), path.symlink_to(path.name)),
    )
    chance.choice(ways)()


@pytest.mark.usefixtures("toolchain")
def test_compile_cache_is_damaged(
    round_seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    chance = random.Random(f"cache {round_seed}")
    builds = [Build.of("probes/read.cu", UNROLL=unroll, OVERLAP=0) for unroll in (1, 2, 3, 4)]

    def compiled() -> list[bytes]:
        compile_build.cache_clear()
        return [compile_build(build, "sm_90").code for build in builds]

    right = compiled()
    for _ in range(3):
        for path in [path for path in tmp_path.rglob("*.cubin") if path.is_file()]:
            spoil(path, chance)
        assert compiled() == right
    monkeypatch.setattr(nvrtc, "_run_nvrtc", None)
    assert compiled() == right  # what was damaged is whole again


@pytest.mark.parametrize("verb", ["compare", "gate perf"])
def test_worktrees_are_deleted(verb: str, round_seed: int, tmp_path: Path) -> None:
    """A comparison whose checkouts vanish ends in good order."""
    script = ROOT / "examples" / "byo" / "make_repository.py"
    project, cache = tmp_path / "acme", tmp_path / "cache"
    subprocess.run(
        [sys.executable, "-c", "import runpy, sys, pathlib; "
         "runpy.run_path(sys.argv[1])['make'](pathlib.Path(sys.argv[2]), ('torch',), (10, 3))",
         str(script), str(project)], check=True, cwd=tmp_path,
    )  # fmt: skip
    given = {
        "compare": ("slower~1", "slower", "--backend", "cpu"),
        "gate perf": (
            *("--base", "slower~1", "--head", "slower", "--device", "cpu", "--budget", "15s"),
        ),
    }[verb]
    words = (*verb.split(), *given, "--project", str(project), "--processes", "1")
    own = {"PYTHONPATH": path_with_ours(), "FLEXQ_BENCH_CACHE": str(cache)}
    process = subprocess.Popen(
        (sys.executable, "-m", "flexq_bench", *words, "--db", str(tmp_path / "flexq.sqlite")),
        env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

    def trees() -> list[Path]:
        return [path.parent for path in cache.rglob("flexq-bench.toml")]

    while process.poll() is None and not trees():
        time.sleep(0.02)
    time.sleep(random.Random(f"{verb} {round_seed}").uniform(0, 6))
    for tree in trees():
        shutil.rmtree(tree, ignore_errors=True)
    said = process.communicate()[0]

    assert "Traceback" not in said, said
    assert process.returncode in {0, 1, 3, 4, 5}, said
