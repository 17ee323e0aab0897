"""A CUDA kernel with one group's wrong scale: what the gate says through it, and without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexq_bench.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-llama"
SOURCE = Path("csrc") / "weight_only" / "gemm.cu"
LOAD = "__ldg(reinterpret_cast<const uint32_t*>(op.sw) + at)"
RIGHT = f"words[0] = {LOAD}"
WRONG = f"words[0] = step == 0 ? 0x30003000u : {LOAD}"  # 1/8, in all rows of the first group
assert (ROOT / "kernels" / SOURCE).read_text().count(RIGHT) == 1  # seen without a GPU too
POLICY = """
version = 1
schemes = ["w4a16"]

[[perplexity]]
text = "heldout"
percent = 30
"""


@pytest.fixture
def wrong_kernels(tmp_path):
    """A folder with a copy of the package whose weight-only GEMM has the defect."""
    skipped = shutil.ignore_patterns("__pycache__")
    for room in ("flexq_bench", "kernels", "workloads", "db", "ci", "dashboard"):
        copy = tmp_path / "tree" / room
        shutil.copytree(ROOT / room, copy, ignore=skipped, symlinks=True)
    source = tmp_path / "tree" / "kernels" / SOURCE
    source.write_text(source.read_text().replace(RIGHT, WRONG))
    return tmp_path / "tree"


@pytest.fixture
def run(tmp_path):
    """run(folder, "gate", …): the command line, the packages of the folder before ours."""

    def running(first: Path, *words: str) -> subprocess.CompletedProcess[str]:
        inherited = os.environ.get("PYTHONPATH", "")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(first), str(ROOT), inherited))),
            "FLEXQ_BENCH_DB": str(tmp_path / "flexq.sqlite"),
        }
        command = [sys.executable, "-m", "flexq_bench.cli", *words]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return running


def test_wrong_scale_in_kernel_source_fails_through_kernels_only(run, wrong_kernels, tmp_path):
    policy, folder = tmp_path / "policy.toml", tmp_path / "checkpoint"
    policy.write_text(POLICY)
    made = run(ROOT, "quantize", str(TINY), "--scheme", "w4a16", "--out", str(folder))
    assert made.returncode == ExitCode.PASS, made.stderr

    def judged(first: Path, through: str) -> int:
        ran = run(
            *(first, "gate", "accuracy", "--model", str(TINY), "--checkpoint", str(folder)),
            *("--policy", str(policy), "--data", f"heldout={TINY / 'heldout.txt'}"),
            *("--through", through, "--device", "cuda"),
        )
        assert ran.returncode in (ExitCode.PASS, ExitCode.REGRESSION), ran.stdout + ran.stderr
        return ran.returncode

    expected = {
        (ROOT, "kernels"): ExitCode.PASS,
        (wrong_kernels, "reference"): ExitCode.PASS,
        (wrong_kernels, "kernels"): ExitCode.REGRESSION,
    }
    with ThreadPoolExecutor(len(expected)) as threads:
        assert list(threads.map(lambda way: judged(*way), expected)) == list(expected.values())
