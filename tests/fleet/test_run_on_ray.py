"""The smoke suite through the command line, with Ray and without."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flexq_bench.cli.app import main
from flexq_bench.db.exchange import read_records
from flexq_bench.measure import sandbox
from flexq_bench.runs.process_meter import SANDBOX

WORKING = [kind for kind in sandbox.KINDS if not sandbox.obstacle(kind)]
# Writes beside its file, starts a process that outlives it, and is right.
ATTACKER = """
import os, socket, subprocess
from flexq_bench.api import linear_kernel

def tried(attack):
    try:
        attack()
    except OSError:
        pass

def attack():
    tried(lambda: open("{outside}", "w").close())
    tried(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=1))
    tried(lambda: subprocess.Popen(["sleep", "{seconds}"], start_new_session=True, env={{}}))

attack()

@linear_kernel("attacker", weight="fp16", backends=["cpu"])
def kernel(x, w, out):
    out.copy_(x @ w.T)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own pipes
def test_smoke_suite_on_a_local_cluster_is_complete(tmp_path: Path):
    database = ("--db", str(tmp_path / "flexq.sqlite"))
    found = []
    for where in ("none", "local"):
        file = tmp_path / f"{where}.jsonl"
        command = ("run", "smoke", "--backend", "cpu", "--cluster", where, "--json", str(file))
        assert main((*command, *database)) == 0
        # Whether a right result is noisy is chance: other programs use this CPU too.
        found.append({r.case: r.status.replace("noisy", "ok") for r in read_records(file)})

    assert found[0] == found[1]
    assert len(found[0]) > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(not WORKING, reason="this machine allows no sandbox")
def test_kernel_of_a_ray_worker_runs_in_a_sandbox(tmp_path: Path, monkeypatch):
    monkeypatch.delenv(sandbox.VARIABLE)
    seconds, outside = f"1{time.monotonic_ns() % 10**8}", tmp_path / "written"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        source = tmp_path / "attacker.py"
        source.write_text(ATTACKER.format(outside=outside, port=port, seconds=seconds))
        shape = ("--m", "1", "--n", "64", "--k", "64", "--kernels", "*.attacker")
        file = tmp_path / "records.jsonl"
        database = ("--db", str(tmp_path / "flexq.sqlite"))
        command = ("sweep", "--kernels-from", str(source), *shape, "--backend", "cpu")

        assert main((*command, "--cluster", "local", "--json", str(file), *database)) == 0

        with pytest.raises(BlockingIOError):
            server.accept()
    (record,) = (record for record in read_records(file) if "attacker" in record.case)
    assert record.status in ("ok", "noisy"), record.detail
    assert record.extra[SANDBOX] == WORKING[0]
    assert not outside.exists()
    assert not any(seconds.encode() in line for line in command_lines())


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()
