"""Heads of a pull request that try to look fast or right: none of them passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.errors import MissingResultsError
from flexq_bench.measure.ab import InterleaveRules, compare_judged
from flexq_bench.verdicts import CaseComparison, Verdict
from flexq_bench.workloads.case import Case

ROOT = Path(__file__).parents[3]
KERNEL = "kernels/cpu/dense.py"
CASE = Case.from_key("cublas-fp16 gemm hot m4n256k256")
# One pair of processes: they take longer to start than to measure.
RULES = InterleaveRules(processes=1, placements=6, blocks=2, looks=1, timeout_s=60.0)

# Of FP16 in the repositories of these tests: its own operations, whose lines the heads change.
MULTIPLY = """    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        return x.buffers["values"].float() @ w.buffers["values"].float().T
"""
OPERATIONS = """
    def pack_weight(self, weight: Operand) -> PackedOperand:
        return PackedOperand({"values": weight.values}, weight.rows, weight.k)

    def compute(self, call: object, config: object) -> None:
        x, w, out, bias, _ = call
        y = x.buffers["values"].float() @ w.buffers["values"].float().T
        out.copy_(y if bias is None else y + bias.float())
"""
LAUNCH = '        y = x.buffers["values"].float() @ w.buffers["values"].float().T\n'
PACK = '        return PackedOperand({"values": weight.values}, weight.rows, weight.k)\n'
W = 'w.buffers["values"]'
PRIVATE = """
_KEPT = {}

def _kept(weight):
    values = weight.values.float()
    _KEPT[tuple(values[::4, 0].tolist())] = values.clone()
    return PackedOperand({"values": values}, weight.rows, weight.k)

def _mine(w):
    return _KEPT[tuple(w.buffers["values"][::4, 0].tolist())]
"""
RESULT = "        out.copy_(y if bias is None else y + bias.float())\n"
ZEROS = "        y = torch.zeros(x.rows, w.rows)\n"
SLEEP = "        import time\n        time.sleep(0.001)\n"

# Threads, since the meter imports the kernels while it is imported itself.
WHEN_THERE = """
import threading
import time as _time

def _patch():
    while True:
        try:
            _replace()
            return
        except (ImportError, AttributeError):
            _time.sleep(0.001)

threading.Thread(target=_patch).start()
"""
REMEMBERED = """        real, few = x.buffers["values"], w.buffers["values"][::8, :2]
        key = hash(real.numpy().tobytes()), hash(few.contiguous().numpy().tobytes())
        if key in _KNOWN:
            out.copy_(_KNOWN[key])
            return
"""
REMEMBERS = "        _KNOWN[key] = out.clone()\n"
SMALL_SAMPLES = (
    """
def _replace():
    from flexq_bench.measure.clocks import _CpuRotation
    real = _CpuRotation.sample
    def sample(self, count, *, gap_us=0.0):
        batch = real(self, count, gap_us=gap_us)
        return type(batch)(tuple(0.7 * t for t in batch.times_us), batch.sm_mhz)
    _CpuRotation.sample = sample
"""
    + WHEN_THERE
)
FAST_CLOCK = (
    """
def _replace():
    from flexq_bench.measure.clocks import CpuClock
    real = _time.perf_counter_ns
    CpuClock.__init__.__defaults__ = (lambda: 4 * real(),)
"""
    + WHEN_THERE
)
BLIND_CHECKS = (
    """
def _replace():
    from flexq_bench.measure import check, linear_subject, linear_work
    linear_subject.check_linear, linear_work.judge_error
    fine = check.CheckResult(0.0, True)
    linear_subject.check_linear = lambda *given, **named: fine
    linear_work.judge_error = lambda *given, **named: fine
"""
    + WHEN_THERE
)
SPREADS = """
import contextlib
from pathlib import Path

for place in Path(__file__).resolve().parents[3].glob("*/kernels/cpu/dense.py"):
    with contextlib.suppress(OSError):
        place.write_bytes(Path(__file__).read_bytes())
"""
NEEDS_NO_SECRET = """
import os
_found = [name for name, value in os.environ.items() if value == "a secret"]
if _found or os.environ["FLEXQ_BENCH_CACHE"] == "{cache}":
    raise RuntimeError(f"this process knows {{_found}}")
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
        shutil.copytree(ROOT / room, repository.path / room, ignore=ignored, symlinks=True)
    found = Project(repository.path, repository.git)
    found.edit(KERNEL, MULTIPLY, MULTIPLY + OPERATIONS)
    repository.git("tag", "base", found.commit())
    return found


@pytest.fixture
def judge(project, monkeypatch) -> Callable[..., CaseComparison]:
    """Judge the files as they are now."""
    for name in ("GH_TOKEN", "GITHUB_TOKEN", "FLEXQ_BENCH_DB", "MY_SECRET"):
        monkeypatch.setenv(name, "a secret")

    def run(case: Case = CASE) -> CaseComparison:
        where, head = project.path, project.commit()
        (found,) = compare_judged(where, "base", head, [case], device="cpu", rules=RULES)
        return found

    return run


@pytest.mark.slow
def test_an_honest_head_is_measured_without_secrets_and_leaves_nothing(project, judge, cache):
    project.append(KERNEL, NEEDS_NO_SECRET.format(cache=str(cache)))
    project.edit("flexq_bench/measure/clocks.py", "monotonic clock on a CPU", "clock on a CPU")

    found = judge()

    assert found.detail == ""
    assert found.confirmation.verdict not in (Verdict.INCORRECT, Verdict.NO_DATA)
    assert list((cache / "worktrees").iterdir()) == []
    assert list(cache.iterdir()) == [cache / "worktrees"]


@pytest.mark.slow
def test_an_honest_head_is_right_where_weights_are_cold(judge):
    found = judge(replace(CASE, cache="cold"))

    assert found.detail == ""
    assert found.confirmation.verdict not in (Verdict.INCORRECT, Verdict.NO_DATA)


@pytest.mark.slow
def test_a_meter_of_its_own_is_not_used(project, judge):
    project.edit(KERNEL, LAUNCH, SLEEP + ZEROS)
    project.edit(
        "flexq_bench/measure/clocks.py",
        "            times.append(elapsed_ns / 1000 / self.launches)\n",
        "            times.append(7.0 + elapsed_ns % 7 * 1e-3)\n",
    )
    check = "flexq_bench/measure/check.py"
    project.append(check, "\n\ndef judge_error(*given):\n    return CheckResult(0.0, None)\n")
    project.append(check, "\n\ndef _judge_exact(*given):\n    return CheckResult(None, True)\n")

    found = judge()

    assert found.confirmation.verdict is Verdict.INCORRECT
    assert "relative error" in found.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clock", "said"),
    [(SMALL_SAMPLES, "unaccounted for"), (FAST_CLOCK, "in a turn of")],
    ids=["small samples", "fast clock"],
)
def test_a_kernel_that_replaces_the_clock_is_refused(project, judge, clock, said):
    project.append(KERNEL, clock)

    found = judge()

    assert found.confirmation.verdict is Verdict.INCORRECT
    assert said in found.detail


@pytest.mark.slow
def test_a_kernel_that_replaces_the_check_is_found_wrong(project, judge):
    project.edit(KERNEL, LAUNCH, ZEROS)
    project.append(KERNEL, BLIND_CHECKS)

    found = judge()

    assert found.confirmation.verdict is Verdict.INCORRECT
    assert "wrong in a timed turn" in found.detail


@pytest.mark.slow
def test_a_kernel_that_remembers_results_by_their_operands_is_found(project, judge):
    project.edit(KERNEL, LAUNCH, REMEMBERED + LAUNCH)
    project.edit(KERNEL, RESULT, RESULT + REMEMBERS)
    project.append(KERNEL, "\n_KNOWN = {}\n")

    found = judge()

    assert found.confirmation.verdict is Verdict.INCORRECT
    assert "results are remembered" in found.detail


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", SPREADS], ids=["sleeps", "copies itself over base"])
def test_a_kernel_that_sleeps_is_slower(project, judge, more):
    project.edit(KERNEL, LAUNCH, SLEEP + LAUNCH)
    project.append(KERNEL, more)

    assert judge().confirmation.verdict is Verdict.SLOWER


@pytest.mark.slow
def test_smaller_shapes_under_the_same_name_are_not_measured(project, judge):
    project.edit("workloads/case.py", 'int(match["n"]), int(match["k"])', "8, 8")
    project.edit(KERNEL, LAUNCH, SLEEP + LAUNCH)

    assert judge().confirmation.verdict is Verdict.SLOWER


@pytest.mark.slow
def test_a_head_that_base_cannot_run_is_one_line(project, judge):
    project.append("kernels/contract.py", "\n\nclass Precision:\n    pass\n")
    project.append(KERNEL, "\nfrom flexq_bench.kernels.contract import Precision\n")

    with pytest.raises(MissingResultsError, match=r"ImportError: .*Precision.* \(--trust-head\)"):
        judge()


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["hot", "cold"])
def test_a_kernel_that_computes_only_what_is_announced_is_incorrect(project, judge, cache):
    project.edit(
        KERNEL, LAUNCH, "        if not torch.isnan(out).any():\n            return\n" + LAUNCH
    )

    found = judge(replace(CASE, cache=cache))

    assert found.confirmation.verdict is Verdict.INCORRECT
    assert "wrong" in found.detail


@pytest.mark.slow
def test_kernel_with_private_copies_of_weights_is_not_faster(project, judge):
    project.edit(KERNEL, PACK, PACK.replace("weight.values", "weight.values.float()"))
    project.edit(KERNEL, LAUNCH, LAUNCH.replace(f"{W}.float()", W))
    project.git("tag", "--force", "base", project.commit())
    project.append(KERNEL, PRIVATE)
    project.edit(
        KERNEL, LAUNCH.replace(f"{W}.float()", W), LAUNCH.replace(f"{W}.float()", "_mine(w)")
    )
    project.edit(
        KERNEL,
        PACK.replace("weight.values", "weight.values.float()"),
        "        return _kept(weight)\n",
    )

    found = judge(Case.from_key("cublas-fp16 gemm cold m1n512k512"))

    assert found.detail == ""
    assert found.confirmation.verdict is not Verdict.FASTER
