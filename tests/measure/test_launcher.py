"""Processes forked from a server, compared with fresh ones."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.measure import worker_process
from flexq_bench.measure.launcher import ForkServer, FreshProcesses
from flexq_bench.measure.worker_process import WorkerProcess
from flexq_bench.repository.descendants import end_marked, new_mark

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers need Linux")

STATE = """
import json, os, signal, subprocess, sys
state = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": list(dict.fromkeys(sys.path)),
    "folder": os.getcwd(), "name": __name__, "file": __file__, "package": __package__,
    "variables": dict(os.environ),
    "inherited": subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines(),
    "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
    "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD)],
    "files": len(os.listdir("/proc/self/fd")), "input": sys.stdin.read(),
    "writes_bytecode": not sys.dont_write_bytecode, "umask": os.umask(0o22),
}
print(json.dumps(state))
"""


class Processes:
    """Starts modules of one folder and collects what they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = []
        self.variables = {**os.environ, "PYTHONPATH": str(folder)}
        self.variables.pop("PYTEST_CURRENT_TEST", None)  # differs from test to test

    def write(self, module: str, text: str) -> None:
        (self.folder / f"{module}.py").write_text(text)

    def start(self, launcher, *command, **variables):
        with tempfile.TemporaryFile() as unread:
            process = launcher.start(
                (sys.executable, *command),
                folder=self.folder,
                environment={**self.variables, **variables},
                stderr=unread,
            )
        self.started.append(process)
        return process

    def end(self):
        for process in self.started:
            process.signal_group(signal.SIGKILL)
            process.wait(20.0)
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()

    def output(self, launcher, *command, given=b"", **variables):
        process = self.start(launcher, *command, **variables)
        process.stdin.write(given)
        process.stdin.close()
        written = process.stdout.read().decode()
        assert process.wait(20.0) == 0
        return written


@pytest.fixture(scope="module")
def server():
    with ForkServer() as server:
        yield server


@pytest.fixture
def processes(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    processes.end()


def state_of(pid: int) -> str:
    """R of one that runs, S of one that waits, T of one that is stopped, Z or X: it ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def is_running(pid: int) -> bool:
    return state_of(pid) not in "ZX"


def test_forked_process_has_the_state_of_a_fresh_one(server, processes):
    processes.write("state", STATE)
    mark = new_mark()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background

    states = [
        json.loads(processes.output(launcher, "-m", "state", "--x", given=b"some", **{mark: "1"}))
        for launcher in (FreshProcesses(), server)
    ]
    signal.signal(signal.SIGINT, usual)

    for state in states:  # the server has a mark of its own
        state["variables"] = {
            name: value
            for name, value in state["variables"].items()
            if name == mark or not name.startswith("FLEXQ_BENCH_STARTED_")
        }
        state["inherited"] = sorted(
            line
            for line in state["inherited"]
            if line.startswith(mark) or not line.startswith(("FLEXQ_BENCH_STARTED_", "_="))
        )
    assert states[0] == states[1]


def test_dependencies_are_loaded_and_no_code_of_the_program(server, processes):
    processes.write("loaded", "import sys; print(sorted({m.split('.')[0] for m in sys.modules}))")

    loaded = processes.output(server, "-m", "loaded")

    assert "'torch'" in loaded
    assert "'flexq_bench'" not in loaded


def test_processes_of_one_server_draw_different_numbers(server, processes):
    processes.write(
        "draws",
        "import mmap, random, numpy, ctypes\n"
        "page = mmap.mmap(-1, 1 << 20)\n"
        "print(random.random(), numpy.random.random(), id(mmap) and "
        "ctypes.addressof(ctypes.c_char.from_buffer(page)))",
    )

    first, second = (processes.output(server, "-m", "draws").split() for _ in range(2))

    assert all(a != b for a, b in zip(first, second, strict=True))


def test_servers_have_their_libraries_at_the_same_addresses(server, processes):
    has_fixed = subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False)
    if has_fixed.returncode != 0:
        pytest.skip("this machine allows no fixed addresses")
    text = (
        "import ctypes; print(ctypes.addressof(ctypes.c_int.in_dll(ctypes.CDLL(None), 'optind')))"
    )
    processes.write("where", text)
    with ForkServer() as other:
        first, second = (processes.output(each, "-m", "where") for each in (server, other))

    assert first == second


def test_threads_of_numpy_and_torch_work_after_the_fork(server, processes):
    processes.write(
        "threads",
        "import numpy, torch\n"
        "a = numpy.ones((300, 300)); t = torch.ones(300, 300)\n"
        "print((a @ a).sum(), float((t @ t).sum()))",
    )

    assert processes.output(server, "-m", "threads").split() == ["27000000.0", "27000000.0"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError('no')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_return_code_is_that_of_subprocess(server, processes, text, code):
    processes.write("ends", text)

    assert processes.start(server, "-m", "ends").wait(20.0) == code


def test_module_that_hides_a_dependency_is_imported(server, processes, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flexq_bench"), "propagate", True)
    caplog.set_level(logging.DEBUG, "flexq_bench")
    processes.write("scipy", "print('mine')")
    processes.write("imports", "import scipy")

    assert processes.output(server, "-m", "imports") == "mine\n"
    assert "other modules: scipy" in caplog.text


def test_variables_that_are_read_at_the_start_take_effect(server, processes):
    processes.write("seed", "print(hash('text'))")

    fresh, forked = (
        processes.output(launcher, "-m", "seed", PYTHONHASHSEED="7")
        for launcher in (FreshProcesses(), server)
    )

    assert fresh == forked


def test_other_command_is_executed(server, processes):
    assert processes.output(server, "-S", "-c", "print('other')") == "other\n"


ORPHAN = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    child = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    print(child.pid, flush=True)
    os._exit(0)
os.wait()
print(".", flush=True)
time.sleep(60)
"""


def test_orphan_without_environment_is_stopped_in_a_pause(server, processes, eventually):
    processes.write("orphans", ORPHAN)
    command = (sys.executable, "-m", "orphans")
    with WorkerProcess(
        "head", processes.folder, command, environment=processes.variables, launcher=server
    ) as worker:
        orphan = int(worker._process.stdout.readline())
        assert worker._process.stdout.readline() == b".\n"

        with worker.paused():
            eventually(lambda: state_of(orphan) == "T")
        worker.kill()


def test_worker_that_another_process_stopped_is_ended(server, processes, monkeypatch):
    monkeypatch.setattr(worker_process, "_LOOK_S", 0.01)
    processes.write("waits", "print('.', flush=True); input()")
    command = (sys.executable, "-m", "waits")
    with WorkerProcess(
        "head", processes.folder, command, environment=processes.variables, launcher=server
    ) as worker:
        assert worker._process.stdout.readline() == b".\n"
        os.kill(worker._process.pid, signal.SIGSTOP)

        with pytest.raises(InfrastructureError, match="stopped by a signal at 'anything'"):
            worker.ask("anything")


def test_orphan_without_environment_ends_with_its_process(server, processes):
    processes.write("orphans", ORPHAN)
    process = processes.start(server, "-m", "orphans")
    orphan = int(process.stdout.readline())
    assert is_running(orphan)

    process.signal_group(signal.SIGKILL)
    process.wait(20.0)

    assert not is_running(orphan)


def test_mark_finds_a_forked_process_and_not_its_server(server, processes):
    processes.write("waits", "print('.', flush=True); input()")
    mark = new_mark()
    marked = processes.start(server, "-m", "waits", **{mark: "1"})
    other = processes.start(server, "-m", "waits", **{new_mark(): "1"})
    assert marked.stdout.readline() == other.stdout.readline() == b".\n"

    end_marked(mark)

    assert marked.wait(20.0) == -signal.SIGKILL
    assert other.poll() is None


def test_process_is_killed_before_its_server_is_ready(processes):
    processes.write("writes", "open('written', 'w')")
    with ForkServer() as server:
        process = processes.start(server, "-m", "writes")

        process.signal_group(signal.SIGKILL)

        assert process.wait() == -signal.SIGKILL
        processes.write("after", "")
        assert processes.start(server, "-m", "after").wait(60.0) == 0
    assert not (processes.folder / "written").exists()


def test_process_that_its_server_never_started_can_be_killed(processes):
    with ForkServer() as server:
        process = processes.start(server, "-m", "any")
        os.kill(server._server.pid, signal.SIGKILL)

        assert process.wait(20.0) == -signal.SIGKILL
        process.signal_group(signal.SIGKILL)


def test_death_of_server_ends_its_processes_until_next_start(processes, eventually):
    processes.write("waits", "print('.', flush=True); input()")
    with ForkServer() as server:
        command = (sys.executable, "-S", "-m", "waits")
        with WorkerProcess(
            "head", processes.folder, command, timeout_s=20.0, launcher=server
        ) as worker:
            pid = worker._process.pid
            os.kill(server._server.pid, signal.SIGKILL)

            with pytest.raises(
                InfrastructureError, match=r"head .*its fork server ended, signal 9"
            ):
                worker.ask("anything")
        eventually(lambda: not is_running(pid))  # the kernel ends it after its parent

        assert processes.output(server, "-S", "-c", "print(1)") == "1\n"


def test_reset_ends_all_processes_and_empties_folders(server, processes, tmp_path):
    processes.write("waits", "print('.', flush=True); input()")
    process = processes.start(server, "-m", "waits")
    process.stdout.readline()
    folder = tmp_path / "private"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").touch()

    server.reset([folder])

    assert process.poll() == -signal.SIGKILL
    assert list(folder.iterdir()) == []


def test_caches_keep_what_the_first_process_wrote(processes, tmp_path):
    folder = tmp_path / "private"
    entry = folder / "cache" / "a" / "entry"
    with ForkServer() as server:
        assert processes.output(server, "-S", "-c", "") == ""  # it runs
        seen = []
        for content in ("compiled", "changed", "changed again"):
            entry.parent.mkdir(parents=True, exist_ok=True)
            entry.write_text(content)
            (folder / "other").touch()
            server.reset([folder], [folder / "cache"])
            seen.append(
                [(path.name, path.read_text()) for path in folder.rglob("*") if path.is_file()]
            )

    assert seen == [[("entry", "compiled")]] * 3


@pytest.mark.slow
def test_processes_keep_variables_that_the_wrapper_of_a_server_sets(processes):
    processes.write("own", "import os, sys; print(os.environ['PWD'], 'torch' in sys.modules)")
    wrap = ("env", "PWD=/elsewhere")  # as bubblewrap does

    with ForkServer(wrap=lambda command: (*wrap, *command)) as server:
        outputs = [processes.output(server, "-m", "own") for _ in range(2)]

    assert outputs == ["/elsewhere True\n"] * 2


def test_nothing_of_a_server_remains_at_its_end(processes, eventually):
    processes.write("waits", "print('.', flush=True); input()")
    with ForkServer() as server:
        process = processes.start(server, "-S", "-m", "waits")
        process.stdout.readline()
        pids = [process.pid, server._server.pid]

    eventually(lambda: not any(map(is_running, pids)))


def test_ids_in_a_pid_namespace_are_of_this_process(processes):
    wrap = (
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    )
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no namespaces")
    processes.write("own", "import os; print(os.getpid(), flush=True); input()")
    mark = new_mark()
    with ForkServer(wrap=lambda command: (*wrap, *command)) as server:
        process = processes.start(server, "-m", "own", **{mark: "1"})
        inner = int(process.stdout.readline())

        assert (
            f"NSpid:\t{process.pid}\t{inner}\n" in Path(f"/proc/{process.pid}/status").read_text()
        )
        end_marked(mark)
        assert process.wait(20.0) == -signal.SIGKILL
