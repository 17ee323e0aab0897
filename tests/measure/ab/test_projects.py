"""Comparisons of commits of another repository."""

from __future__ import annotations

from functools import partial

from flexq_bench.measure.ab import InterleaveRules, compare_project
from flexq_bench.measure.device_lock import device_alone
from flexq_bench.repository.project import FILE, open_project, revision
from workloads.case import Case
from workloads.gemm import GemmWorkload

KERNEL = """
from flexq_bench.api import linear_kernel


@linear_kernel("dense", weight="fp16", backends=["cpu"])
def dense(x, w, out):
    out.copy_(x @ w.T)
"""


def test_it_does_not_wait_for_itself_to_be_done_with_the_device(tmp_path, git, monkeypatch):
    for name in ("cache", "locks", "theirs"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLEXQ_BENCH_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(
        "flexq_bench.measure.ab.experiment.device_alone", partial(device_alone, wait_s=1.0)
    )
    theirs = tmp_path / "theirs"
    (theirs / FILE).write_text('version = 1\nname = "acme"\nkernels = ["k.py"]\nsuite = "smoke"\n')
    (theirs / "k.py").write_text(KERNEL)
    git(theirs, "init", "-q", "-b", "main")
    git(theirs, "add", "--all")
    git(theirs, "commit", "-q", "-m", "a kernel")
    project = open_project(str(theirs))
    head = revision(project, "HEAD")
    rules = InterleaveRules(processes=1, placements=5, looks=1)
    case = Case("acme.dense", GemmWorkload(1, 64, 64))

    (compared,) = compare_project(project, head, head, [case], device="cpu", rules=rules)

    assert compared.detail == ""
    assert len(compared.comparison.base_us) == 10
