"""Lock of a device: only one process measures at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.measure import device_lock
from flexq_bench.measure.device_lock import device_alone, devices_alone

# The module alone: its package imports torch, which takes seconds in each process.
HOLD = (
    "import importlib.util, sys\n"
    f"spec = importlib.util.spec_from_file_location('device_lock', {device_lock.__file__!r})\n"
    "module = sys.modules['device_lock'] = importlib.util.module_from_spec(spec)\n"
    "spec.loader.exec_module(module)\n"
    "with module.device_alone('GPU-1', shared={shared}):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_LOCKS", str(tmp_path))
    return tmp_path


@pytest.fixture
def another(folder):
    """another(): a process that holds the device until it is killed."""
    started = []

    def start(*, shared=False):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD.format(shared=shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_locked_device_is_refused_with_the_holder(another):
    holder = another()

    told = rf"process {holder.pid} measures on .*GPU-1"
    with pytest.raises(InfrastructureError, match=told), device_alone("GPU-1", wait_s=0.3):
        pass
    with device_alone("GPU-2", wait_s=0.3):
        pass


def test_killed_process_releases_its_lock(another):
    holder = another()
    holder.kill()
    holder.wait()

    with device_alone("GPU-1", wait_s=5):
        pass


def test_shared_lock_excludes_exclusive_locks(another):
    another(shared=True)

    with device_alone("GPU-1", shared=True, wait_s=0.3):
        pass
    with pytest.raises(InfrastructureError), device_alone("GPU-1", wait_s=0.3):
        pass


def test_waiting_process_logs_the_holder(another, caplog):
    holder = another()

    with pytest.raises(InfrastructureError), device_alone("GPU-1", wait_s=0.3):
        pass

    assert f"process {holder.pid} measures on device GPU-1: waiting" in caplog.text


def test_symlink_instead_of_a_lock_is_refused(folder):
    with device_alone("GPU-1"):
        [lock] = folder.iterdir()
    target = folder / "private"
    lock.unlink()
    lock.symlink_to(target)

    told = "can't be opened to hold the device"
    with pytest.raises(InfrastructureError, match=told), device_alone("GPU-1"):
        pass
    assert not target.exists()


def test_lock_file_is_readable_for_other_users(folder):
    before = os.umask(0o077)
    try:
        with device_alone("GPU-1"):
            pass
    finally:
        os.umask(before)
    [lock] = folder.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o644


def test_lock_folder_is_created(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_LOCKS", str(tmp_path / "not" / "there"))

    with device_alone("GPU-1"):
        assert list((tmp_path / "not" / "there").iterdir())


def test_lock_folder_that_cannot_be_created_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLEXQ_BENCH_LOCKS", str(tmp_path / "file" / "locks"))

    told = r"can't be opened to hold the device \(Not a directory\)"
    with pytest.raises(InfrastructureError, match=told), device_alone("GPU-1"):
        pass


def test_comparisons_decodes_and_pools_wait_for_the_lock(folder, monkeypatch):
    """A comparison, a decode, a pool before it has memory there: each names who it waits for."""
    from flexq_bench.db.engine import open_database
    from flexq_bench.decode import runs as decoding
    from flexq_bench.decode.case import Setup
    from flexq_bench.fleet import PoolOptions, open_pool
    from flexq_bench.measure.ab import InterleaveRules, compare_trees
    from flexq_bench.measure.ab.experiment import Side
    from flexq_bench.measure.device import device_info
    from flexq_bench.workloads.case import Case
    from flexq_bench.workloads.gemm import GemmWorkload

    held = HOLD.replace("GPU-1", device_info("cpu").uuid).format(shared=False)
    with subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        for module, hold in (
            ("measure.ab.course", devices_alone),
            ("decode.runs", devices_alone),
            ("fleet.pool_choice", device_alone),
        ):
            short = partial(hold, wait_s=0.3)
            monkeypatch.setattr(sys.modules[f"flexq_bench.{module}"], hold.__name__, short)
        case = Case("empty", GemmWorkload(1, 1, 1))
        tree = Side("x", folder)
        told = f"process {process.pid} measures on"
        with pytest.raises(InfrastructureError, match=told):
            list(compare_trees(tree, tree, [case], device="cpu", rules=InterleaveRules()))
        setup = Setup("tiny", (), "cpu")
        with pytest.raises(InfrastructureError, match=told):
            decoding.measure_decodes(None, setup, [], {}, lambda record: None)
        here = PoolOptions(device="cpu")
        with (
            open_database(str(folder / "results.sqlite")) as database,
            pytest.raises(InfrastructureError, match=told),
            open_pool(database, here, None),
        ):
            pass
        process.kill()
