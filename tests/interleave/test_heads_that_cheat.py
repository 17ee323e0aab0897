"""Heads of a pull request that try to look fast or right: none of them passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flexq_bench.interleave import CaseComparison, InterleaveRules, compare_judged
from flexq_bench.regress import Verdict
from workloads.case import Case

ROOT = Path(__file__).parents[2]
KERNEL = "kernels/cpu/dense.py"
CASE = Case.from_key("cublas-fp16 gemm hot m4n256k256")
# One pair of processes: they take longer to start than to measure.
RULES = InterleaveRules(processes=1, placements=6, blocks=2, looks=1, timeout_s=60.0)

LAUNCH = '        y = x.buffers["values"].float() @ w.buffers["values"].float().T\n'
ZEROS = "        y = torch.zeros(x.rows, w.rows)\n"
SLEEP = "        import time\n        time.sleep(0.001)\n"

SLOW_CLOCK = """
import time
_real, _real_ns = time.perf_counter, time.perf_counter_ns
time.perf_counter = lambda: 0.7 * _real()
time.perf_counter_ns = lambda: int(0.7 * _real_ns())
"""
SMALL_SAMPLES = """
import threading
def _patch():
    import time
    while True:
        try:
            from flexq_bench.measure.clocks import _CpuRotation
            break
        except ImportError:
            time.sleep(0.01)
    real = _CpuRotation.sample
    _CpuRotation.sample = lambda self, count: [0.7 * t for t in real(self, count)]
threading.Thread(target=_patch).start()
"""
BLIND_CHECKS = """
import threading
def _patch():
    import time
    while True:
        try:
            from flexq_bench.measure import check, subject
            subject.check_linear, subject.judge_error
            break
        except (ImportError, AttributeError):
            time.sleep(0.01)
    fine = check.CheckResult(0.0, True)
    subject.check_linear = lambda *given, **named: fine
    subject.judge_error = lambda *given, **named: fine
threading.Thread(target=_patch).start()
"""


class Project:
    """A copy of this project in a git repository of its own."""

    def __init__(self, path: Path, git: Callable[..., str]) -> None:
        self.path, self.git = path, git

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.path / path
        text = file.read_text()
        assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
        file.write_text(text.replace(old, new))

    def append(self, path: str, text: str) -> None:
        file = self.path / path
        file.write_text(file.read_text() + text)

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", "change")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def project(repository) -> Project:
    for room in ("workloads", "kernels", "flexq_bench", "db"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, repository.path / room, ignore=ignored)
    found = Project(repository.path, repository.git)
    repository.git("tag", "base", found.commit())
    return found


def judged(project: Project) -> CaseComparison:
    (found,) = compare_judged(
        project.path, "base", project.commit(), [CASE], device="cpu", rules=RULES
    )
    return found


def honest(project: Project) -> None:
    """No change."""


def edited_meter(project: Project) -> None:
    """A kernel that sleeps and returns zeros, with a clock and a check of its own."""
    project.edit(KERNEL, LAUNCH, SLEEP + ZEROS)
    project.edit(
        "flexq_bench/measure/clocks.py",
        "            times.append(elapsed_ns / 1000 / self.launches)\n",
        "            times.append(7.0 + elapsed_ns % 7 * 1e-3)\n",
    )
    check = "flexq_bench/measure/check.py"
    project.append(check, "\n\ndef judge_error(*given):\n    return CheckResult(0.0, None)\n")
    project.append(check, "\n\ndef _judge_exact(*given):\n    return CheckResult(None, True)\n")


def slow_clock(project: Project) -> None:
    project.append(KERNEL, SLOW_CLOCK)


def small_samples(project: Project) -> None:
    project.append(KERNEL, SMALL_SAMPLES)


def blind_checks(project: Project) -> None:
    project.edit(KERNEL, LAUNCH, ZEROS)
    project.append(KERNEL, BLIND_CHECKS)


def zeros(project: Project) -> None:
    project.edit(KERNEL, LAUNCH, ZEROS)


def small_shapes(project: Project) -> None:
    project.edit(
        "workloads/case.py",
        "gemm = GemmWorkload(",
        "gemm = GemmWorkload(",
    )


@pytest.mark.parametrize(
    "attack", [honest, edited_meter, slow_clock, small_samples, blind_checks, zeros]
)
def test_it(project, attack):
    attack(project)
    found = judged(project)
    print(attack.__name__, found.confirmation.verdict, found.confirmation.reason, found.detail)
