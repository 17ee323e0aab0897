"""A project on a cluster whose nodes have no file in common with the coordinator."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from separate_machines import can_separate, machines

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "byo" / "make_repository.py"


@pytest.mark.slow
@pytest.mark.skipif(not can_separate(), reason="needs namespaces of its own")
def test_project_night_on_two_kinds_needs_no_shared_path(tmp_path):
    spec = importlib.util.spec_from_file_location("make_repository", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make(tmp_path / "acme", ("torch",), (100, 30), "256x256")
    hidden = [tmp_path / "acme", *(ROOT / n for n in ("flexq_bench", "kernels", "workloads", "db"))]
    variables = {"PYTHONPATH": str(ROOT), "FLEXQ_BENCH_CACHE": str(tmp_path / "cache")}
    # Ray's sockets lie below, and their paths may have 107 characters only.
    with tempfile.TemporaryDirectory(dir="/tmp") as short, machines(Path(short), hidden) as nodes:
        nodes.add("alpha", "Alpha CPU")
        nodes.add("beta", "Beta CPU")
        night = ("nightly", "--project", str(tmp_path / "acme"), "--backend", "cpu", "--json")
        place = ("--cluster", nodes.address, "--gpus", "Alpha*,Beta*", "--canaries", "1")
        database = ("--times", "scan=1", "--db", str(tmp_path / "flexq.sqlite"))
        done = subprocess.run(
            (sys.executable, "-m", "flexq_bench.cli", *night, *place, *database),
            env={**os.environ, **variables},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.stdout, done.stderr
    reports = json.loads(done.stdout)
    assert sorted(report["gpu"] for report in reports) == ["Alpha CPU", "Beta CPU"]
    assert all(report["received"] == report["planned"] for report in reports), done.stderr
    assert [report["canaries"] for report in reports] == [1, 1], done.stderr
