"""Environment and processes of workers that run unreviewed code."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexq_bench.measure import worker_process
from flexq_bench.measure.ab.blocks import on_one_cpu
from flexq_bench.measure.ab.experiment import trusted_pair
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.worker_messages import odd_value
from flexq_bench.measure.worker_process import WorkerError, WorkerProcess
from flexq_bench.workloads.case import Case

CASE = Case.from_key("cublas-fp16 gemm hot m4n64k96")


@pytest.mark.parametrize(
    "name",
    [
        *("GH_TOKEN", "GITHUB_TOKEN", "GITHUB_OUTPUT", "ACTIONS_RUNTIME_TOKEN"),
        *("FLEXQ_BENCH_DB", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"),
        *("PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "GIT_DIR", "ANYTHING_ELSE"),
    ],
)
def test_unlisted_variables_are_not_passed(monkeypatch, name):
    monkeypatch.setenv(name, "secret")

    with clean_environment() as environment:
        assert name not in environment


def test_variables_of_programs_and_devices_are_passed(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LC_ALL", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "1")

    with clean_environment() as environment:
        passed = {name for name, value in environment.items() if value == "1"}

    assert passed >= {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LC_ALL", "LD_LIBRARY_PATH"}
    assert environment["PATH"] == os.environ["PATH"]


def test_home_and_cache_are_private_and_temporary():
    with clean_environment() as one, clean_environment() as other:
        own = [one[name] for name in ("HOME", "TMPDIR", "FLEXQ_BENCH_CACHE")]
        assert all(Path(folder).is_dir() for folder in own)
        assert not {*own} & {*other.values()}
        assert os.environ["HOME"] not in (one["HOME"], other["HOME"])

    assert not any(Path(folder).exists() for folder in own)


def test_user_packages_are_found():
    ask = "import site; print(site.getusersitepackages())"
    known = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True).stdout

    with clean_environment() as environment:
        found = subprocess.run(
            [sys.executable, "-c", ask], env=environment, capture_output=True, check=True
        )

    assert found.stdout == known


def test_worker_gets_only_the_given_variables(a_tree, tmp_path, monkeypatch):
    monkeypatch.setenv("GH_TOKEN", "secret")
    told = tmp_path / "told"
    tell = "import os, sys; open(sys.argv[1], 'w').write(chr(10).join(os.environ.values()))"
    tree = a_tree("head").tree

    with (
        clean_environment() as environment,
        WorkerProcess(
            "head",
            tree,
            (sys.executable, "-S", "-c", tell, str(told)),
            timeout_s=20.0,
            environment=environment,
        ) as worker,
        pytest.raises(WorkerError),
    ):
        worker.ask("describe")

    assert "secret" not in told.read_text().splitlines()
    assert str(tree) in told.read_text().splitlines()


def test_worker_does_not_get_the_database_url(a_tree, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_DB", "secret")
    tell = "import os, sys; sys.exit(os.environ.get('FLEXQ_BENCH_DB', 'not told'))"
    command = (sys.executable, "-S", "-c", tell)

    with (
        WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker,
        pytest.raises(WorkerError, match="not told"),
    ):
        worker.ask("describe")


def test_reply_written_before_its_request_is_refused(a_tree):
    forge = (
        "import json, sys\n"
        "print(json.dumps({'id': 1, 'reply': {'samples_us': [0.1]}}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = (sys.executable, "-S", "-c", forge)

    with (
        WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker,
        pytest.raises(WorkerError, match="head answered 'turn' with"),
    ):
        worker.ask("turn")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("b'[' * 10**5", "answered 'turn' with"),
        ('b\'{"id": %d, "reply": 7}\' % number', "an answer without a reply"),
        ('b\'{"id": %d, "reply": {}}\' % number', "a reply without 'samples_us'"),
        ('b\'{"id": %d, "reply": {"samples_us": 7}}\' % number', "an odd 'samples_us'"),
        ("b'x' * 3000", "answered 'turn' without an end"),
        (
            'b\'{"id": %d, "reply": [[%s]]}\' % (number, b"[]," * 900 + b"0")',
            "answered 'turn' with",
        ),
    ],
    ids=["deep", "no reply", "empty", "odd", "endless", "many"],
)
def test_bad_reply_is_the_worker_s_error(a_tree, monkeypatch, reply, said):
    if "end" in said:
        monkeypatch.setattr(worker_process, "_MAX_REPLY_BYTES", 2000)
    monkeypatch.setattr(worker_process, "_MAX_REPLY_VALUES", 1000)
    forge = (
        "import json, os, sys\n"
        "number = json.loads(sys.stdin.readline())['id']\n"
        f"os.write(1, {reply} + (b'' if {'end' in said} else b'\\n'))\n"
        "sys.stdin.read()\n"
    )
    command = (sys.executable, "-S", "-c", forge)

    with (
        WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker,
        pytest.raises(WorkerError, match=f"head.*{said}"),
    ):
        worker.ask("turn")["samples_us"]


@pytest.mark.parametrize(
    "before",
    ["fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, 4096)", "os.write(os.open('/proc/self/fd/0', 1), full)"],
    ids=["small", "full"],
)
def test_worker_that_reads_no_request_is_ended(a_tree, before):
    code = f"import fcntl, os, time; full = bytes(1 << 16); {before}; print(1, flush=True)"
    command = (sys.executable, "-S", "-c", f"{code}; time.sleep(60)")

    with WorkerProcess("head", a_tree("head").tree, command, timeout_s=0.2) as worker:
        worker._process.stdout.readline()
        with pytest.raises(WorkerError, match="head gave no answer to 'turn' in"):
            worker.send("turn", text="x" * 5000)


def test_odd_values_of_a_reply_are_found():
    config = {"stages": 8, "kind": "a", "tile": [16, [64, None]]}
    usual = {"wrong": "", "config": config, "binary": None, "mhz": None}
    nested: object = 1
    for _ in range(900):
        nested = [nested]
    odd: dict[str, tuple[object, ...]] = {
        "root": (None, 7, [], "x" * 5000),
        "needed": (None, "", {}, 10**400, -math.inf),
        "config": (True, "x", [1], {"a": [{}]}, {"a": "x" * 5000}, {"a": [1] * 200}, {"a": nested}),
        "binary": (7, "x" * 5000),
        "samples_us": (None, 7, [], {}, "xyz", ["1.0"], [1e300]),
        "mhz": ("", [], 1e308),
    }

    assert odd_value(usual) == ""
    for name, values in odd.items():
        assert [odd_value({**usual, name: value}) for value in values] == [name] * len(values)


@pytest.mark.parametrize("key", ["error", "wrong"])
def test_text_of_a_reply_is_printable_and_bounded(a_tree, key):
    forge = (
        "import json, sys\n"
        "number = json.loads(sys.stdin.readline())['id']\n"
        "text = '\\ud800\\x1b[31m\\n' + 'x' * 3000\n"
        "reply = {'error': text * 1000, 'reply': {'wrong': text}}\n"
        f"del reply[{'reply' if key == 'error' else 'error'!r}]\n"
        "print(json.dumps({'id': number, **reply}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = (sys.executable, "-S", "-c", forge)

    with WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker:
        if key == "wrong":
            text = worker.ask("turn")["wrong"]
        else:
            with pytest.raises(WorkerError) as raised:
                worker.ask("turn")
            text = str(raised.value)

    assert text.isprintable()
    assert 3000 < len(text) < 5000


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("fcntl.fcntl(2, fcntl.F_SETFL, os.O_DIRECT)", "died"),
        ("os.ftruncate(2, 1 << 40)", "died|wrote over"),
        ("os.lseek(2, 0, os.SEEK_SET); os.ftruncate(2, 0)", "died"),
        ("os.ftruncate(2, 1 << 30); time.sleep(60)", "wrote over .* to stderr and was ended"),
    ],
    ids=["direct", "huge", "empty", "flood"],
)
def test_log_that_a_worker_spoils_is_its_error(a_tree, monkeypatch, code, said):
    monkeypatch.setattr(worker_process, "_LOOK_S", 0.1)
    spoil = "import fcntl, os, sys, time; print('reason', file=sys.stderr, flush=True)\n"
    spoil += f"sys.stdin.readline(); {code}; os._exit(3)"
    command = (sys.executable, "-S", "-c", spoil)

    with (
        WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker,
        pytest.raises(WorkerError, match=f"^head ({said})"),
    ):
        worker.ask("describe")


def test_reason_of_a_death_may_precede_the_request(a_tree, tmp_path, eventually):
    written = tmp_path / "written"
    dies = (
        "import pathlib, sys\n"
        "print('ImportError: no Precision', file=sys.stderr, flush=True)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "sys.stdin.readline()\n"
        "sys.exit(1)\n"
    )
    command = (sys.executable, "-S", "-c", dies, str(written))

    with WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker:
        eventually(written.exists)
        with pytest.raises(WorkerError, match="at 'describe': ImportError: no Precision"):
            worker.ask("describe")


def test_worker_that_closes_its_pipe_is_reported(a_tree, monkeypatch):
    monkeypatch.setattr(worker_process, "_GRACE_S", 0.1)
    closes = "import os, sys, time; sys.stdin.readline(); os.close(1); time.sleep(60)"
    command = (sys.executable, "-S", "-c", closes)

    with (
        WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker,
        pytest.raises(WorkerError, match=r"^head died \(it closed the pipe of its replies\) at"),
    ):
        worker.ask("describe")


def test_worker_whose_pipe_another_process_keeps_is_reported(a_tree, monkeypatch):
    monkeypatch.setattr(worker_process, "_LOOK_S", 0.1)
    leaves = "import os, sys, time; sys.stdin.readline(); os.fork() and os._exit(3); time.sleep(60)"
    command = (sys.executable, "-S", "-c", leaves)

    with (
        WorkerProcess("head", a_tree("head").tree, command, timeout_s=20.0) as worker,
        pytest.raises(WorkerError, match=r"^head died \(exit code 3\) at 'describe'"),
    ):
        worker.ask("describe")


def state_of(pid):
    """R of one that runs, T of one that is stopped, Z of one that ended; empty: it's gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def is_over(pid):
    """Return True if the process has ended."""
    return state_of(pid) in ("Z", "")


@pytest.mark.parametrize("then", ["time.sleep(600)", "os._exit(1)"])
def test_processes_in_other_sessions_end_with_the_worker(a_tree, tmp_path, eventually, then):
    told = tmp_path / "told"
    start = (
        "import os, subprocess, sys, time\n"
        "started = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open(sys.argv[1], 'w').write(str(started.pid))\n{then}\n"
    )
    command = (sys.executable, "-S", "-c", start, str(told))

    with WorkerProcess("head", a_tree("head").tree, command, timeout_s=3.0) as worker:
        eventually(lambda: told.exists() and told.read_text())
        with pytest.raises(WorkerError):
            worker.ask("describe")

    eventually(lambda: is_over(told.read_text()))


def test_paused_worker_is_stopped(a_tree, command):
    with WorkerProcess("head", a_tree("head").tree, command, timeout_s=5.0) as worker:
        worker.request_identity()
        worker.check_identity()
        worker.allow(0.5)
        with worker.paused(), pytest.raises(WorkerError, match="gave no answer to 'describe'"):
            worker.ask("describe")


def test_processes_of_a_paused_worker_are_stopped(a_tree, tmp_path, eventually):
    told = tmp_path / "told"
    start = (
        "import subprocess, sys, time\n"
        "busy = [sys.executable, '-S', '-c', 'while True: pass']\n"
        "started = subprocess.Popen(busy, start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(started.pid))\n"
        "time.sleep(600)\n"
    )
    command = (sys.executable, "-S", "-c", start, str(told))

    with WorkerProcess("head", a_tree("head").tree, command) as worker:
        eventually(lambda: told.exists() and told.read_text())
        pid = told.read_text()
        with worker.paused():
            eventually(lambda: state_of(pid) == "T")
        eventually(lambda: state_of(pid) == "R")
    eventually(lambda: is_over(pid))


def test_changed_priority_of_a_worker_is_reported(a_tree, tmp_path, eventually):
    told = tmp_path / "told"
    start = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    command = (sys.executable, "-S", "-c", start, str(told))

    with WorkerProcess("base", a_tree("base").tree, command) as worker:
        eventually(lambda: told.exists() and told.read_text())
        assert worker.rescheduled() == ""
        pid = int(told.read_text())
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + 1)
        assert worker.rescheduled() == "priority"


of_two_cpus = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="this process has one CPU"
)


@of_two_cpus
def test_sides_of_a_case_on_a_cpu_share_a_core(a_tree):
    command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    pair = trusted_pair(CASE, CASE)
    pair.is_on_cpu = True

    with (
        WorkerProcess("base", a_tree("base").tree, command) as base,
        WorkerProcess("head", a_tree("head").tree, command) as head,
    ):
        with on_one_cpu(pair, [(pair.base, base), (pair.head, head)]):
            cores = [os.sched_getaffinity(worker._process.pid) for worker in (base, head)]
        assert [base.rescheduled(), head.rescheduled()] == ["", ""]

    assert cores[0] == cores[1]
    assert len(cores[0]) == 1


@of_two_cpus
def test_inherited_change_of_priority_is_reported(a_tree):
    cpus = os.sched_getaffinity(0)
    command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    try:
        with WorkerProcess("head", a_tree("head").tree, command):
            os.sched_setaffinity(0, {min(cpus)})  # as its code may do to the process that judges
        with WorkerProcess("base", a_tree("base").tree, command) as worker:
            assert worker.rescheduled() == "CPUs"
    finally:
        os.sched_setaffinity(0, cpus)


def test_dependencies_on_the_python_path_stay(monkeypatch, tmp_path):
    installed, sources = tmp_path / "site", tmp_path / "sources"
    (installed / "platformdirs-4.14.5.dist-info").mkdir(parents=True)
    sources.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(sources), "", str(installed)]))

    with clean_environment() as variables:
        assert variables["PYTHONPATH"] == str(installed)
