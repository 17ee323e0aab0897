"""What a process that runs unreviewed code gets to know."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.worker_process import WorkerError, WorkerProcess


@pytest.mark.parametrize(
    "name",
    [
        *("GH_TOKEN", "GITHUB_TOKEN", "GITHUB_OUTPUT", "ACTIONS_RUNTIME_TOKEN"),
        *("FLEXQ_BENCH_DB", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"),
        *("PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "GIT_DIR", "ANYTHING_ELSE"),
    ],
)
def test_what_is_not_named_does_not_pass(monkeypatch, name):
    monkeypatch.setenv(name, "secret")

    with clean_environment() as environment:
        assert name not in environment


def test_what_finds_programs_and_devices_passes(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LC_ALL", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "1")

    with clean_environment() as environment:
        passed = {name for name, value in environment.items() if value == "1"}

    assert passed >= {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LC_ALL", "LD_LIBRARY_PATH"}
    assert environment["PATH"] == os.environ["PATH"]


def test_home_and_cache_are_its_own_and_go():
    with clean_environment() as one, clean_environment() as other:
        own = [one[name] for name in ("HOME", "TMPDIR", "FLEXQ_BENCH_CACHE")]
        assert all(Path(folder).is_dir() for folder in own)
        assert not {*own} & {*other.values()}
        assert os.environ["HOME"] not in (one["HOME"], other["HOME"])

    assert not any(Path(folder).exists() for folder in own)


def test_packages_that_are_installed_for_the_user_are_found():
    ask = "import site; print(site.getusersitepackages())"
    known = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True).stdout

    with clean_environment() as environment:
        found = subprocess.run(
            [sys.executable, "-c", ask], env=environment, capture_output=True, check=True
        )

    assert found.stdout == known


def test_a_worker_gets_no_more_than_it_is_given(a_tree, tmp_path, monkeypatch):
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


def is_over(pid):
    """Whether it ended, if only its exit code is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("then", ["time.sleep(600)", "os._exit(1)"])
def test_what_a_worker_starts_in_a_session_of_its_own_ends_with_it(a_tree, tmp_path, then):
    told = tmp_path / "told"
    start = (
        "import os, subprocess, sys, time\n"
        "started = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open(sys.argv[1], 'w').write(str(started.pid))\n{then}\n"
    )
    command = (sys.executable, "-S", "-c", start, str(told))

    with (
        WorkerProcess("head", a_tree("head").tree, command, timeout_s=3.0) as worker,
        pytest.raises(WorkerError),
    ):
        worker.ask("describe")

    assert wait_until(lambda: is_over(told.read_text()))


def wait_until(condition):
    """Whether it holds within five seconds: a signal needs a moment."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_paused_worker_does_nothing(a_tree, command):
    with WorkerProcess("head", a_tree("head").tree, command, timeout_s=5.0) as worker:
        worker.check_identity()
        with worker.paused(), pytest.raises(WorkerError, match="gave no answer to 'describe'"):
            worker.ask("describe")
