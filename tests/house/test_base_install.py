"""The wheel without any extra: what the base install is for works on a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flexq_bench.exit_codes import ExitCode
from flexq_bench.packages import EXTRAS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHAPE = ("--n", "64", "--k", "128", "--m", "1", "--stage", "gemm", "--cache", "hot")


@pytest.fixture(scope="module")
def base(install):
    modules = {name for names in EXTRAS.values() for name in names} - {"cuda.bindings"}
    return install(refused=modules | {"cuda", "ruptures", "tokenizers"})


def test_base_install_sweeps_and_compares(base):
    uuids = []
    for _ in range(2):
        arguments = ("--kernels", "flexq-w6a6", *SHAPE, "--backend", "cpu", "--json", "-")
        lines = base("sweep", *arguments, "--db", "sweeps.sqlite").splitlines()
        records = [json.loads(line) for line in lines]
        assert "flexq-w6a6" in {record["kernel"] for record in records}
        uuids.append(records[0]["run"])

    # two runs of one commit may differ by the noise of a busy CPU
    report = base(
        *("compare", *uuids, "--kind", "runs", "--db", "sweeps.sqlite", "--json"),
        codes=[ExitCode.PASS, ExitCode.REGRESSION, ExitCode.AMBIGUOUS],
    )
    assert json.loads(report)["base"] == uuids[0]


def test_base_install_runs_the_smoke_suite(base):
    lines = base("run", "smoke", "--backend", "cpu", "--db", "runs.sqlite", "--json", "-")

    records = [json.loads(line) for line in lines.splitlines()]
    # The largest weights do not fit every CPU's L2, so they are not hot.
    unsupported = [record for record in records if record["status"] == "unsupported"]
    assert all("do not fit the L2" in record["detail"] for record in unsupported)
    assert {record["status"] for record in records} <= {"ok", "noisy", "unsupported"}


def test_base_install_gates_a_commit(base, tmp_path, git):
    for room in ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, tmp_path / "checkout" / room, ignore=ignored, symlinks=True)
    git(tmp_path / "checkout", "init", "-q", "-b", "main")
    git(tmp_path / "checkout", "add", ".")
    git(tmp_path / "checkout", "commit", "-q", "-m", "A commit, compared with itself")
    (tmp_path / "mine.toml").write_text(
        'description = "mine"\n[[group]]\nkernels = ["flexq-w6a6"]\nm = "1"\nshapes = ["64x128"]\n'
    )
    policy = tmp_path / "gate.toml"
    policy.write_text('version = 1\nsuite = "mine.toml"\nslower_percent = 20\n')

    report = base(
        *("gate", "perf", "--base", "HEAD", "--repository", str(tmp_path / "checkout")),
        *("--policy", str(policy), "--device", "cpu", "--db", "gates.sqlite", "--json", "-"),
        codes=[ExitCode.PASS, ExitCode.AMBIGUOUS],
    )

    assert "flexq-w6a6" in report
