"""Comparisons of commits of another repository."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from flexq_bench.measure.ab import InterleaveRules, compare_judged_project, compare_project
from flexq_bench.measure.device_lock import devices_alone
from flexq_bench.repository.project import FILE, open_project, revision
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

KERNEL = """
from flexq_bench.api import linear_kernel


@linear_kernel("dense", weight="fp16", backends=["cpu"])
def dense(x, w, out):
    out.copy_(x @ w.T)
"""


CASE = Case("acme.dense", GemmWorkload(1, 64, 64))
RULES = InterleaveRules(processes=1, placements=5, looks=1)


@pytest.fixture
def theirs(tmp_path, git, monkeypatch):
    """A repository with one commit."""
    for name in ("cache", "locks", "theirs"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLEXQ_BENCH_LOCKS", str(tmp_path / "locks"))
    folder = tmp_path / "theirs"
    (folder / FILE).write_text('version = 1\nname = "acme"\nkernels = ["k.py"]\nsuite = "smoke"\n')
    (folder / "k.py").write_text(KERNEL)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "-m", "a kernel")
    return folder


@pytest.mark.slow
def test_project_comparison_does_not_wait_for_its_own_lock(theirs, monkeypatch):
    monkeypatch.setattr(
        "flexq_bench.measure.ab.course.devices_alone", partial(devices_alone, wait_s=1.0)
    )
    project = open_project(str(theirs))
    head = revision(project, "HEAD")

    (compared,) = compare_project(project, head, head, [CASE], device="cpu", rules=RULES)

    assert compared.detail == ""
    assert len(compared.comparison.base_us) == 10


def test_head_that_imports_from_the_checkout_is_refused(theirs, git, monkeypatch):
    (theirs / "k.py").write_text(f"import no_such_thing\n{KERNEL}")
    git(theirs, "commit", "-q", "-a", "-m", "an import")
    (theirs / "no_such_thing.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(theirs))
    project = open_project(str(theirs))
    base, head = (revision(project, text) for text in ("HEAD~1", "HEAD"))

    (compared,) = compare_project(project, base, head, [CASE], device="cpu", rules=RULES)

    assert f"ImportError: no_such_thing is found in {theirs}/no_such_thing.py" in compared.detail


@pytest.mark.slow
def test_judged_project_starts_no_worker_ahead(theirs, started, monkeypatch):
    monkeypatch.setattr("flexq_bench.measure.ab.course.can_start_beside", lambda _device: True)
    project = open_project(str(theirs))
    head = revision(project, "HEAD")
    unknown = replace(CASE, kernel="acme.unknown")  # refused by the first pair of processes
    rules = InterleaveRules(processes=5, looks=1)

    (compared,) = compare_judged_project(project, head, head, [unknown], device="cpu", rules=rules)

    assert "unknown" in compared.detail
    assert len(started) == 2


WITH_HELPER = """
from flexq_bench.api import linear_kernel


@linear_kernel("{name}", weight="fp16", backends=["cpu"])
def kernel(x, w, out):
    import helper

    out.copy_(helper.multiply(x, w))
"""


@pytest.mark.slow
def test_kernel_file_imports_the_module_in_its_folder(theirs, git):
    """Another file of the project has a module of the same name in its folder."""
    for name in ("attention", "mlp"):
        (theirs / name).mkdir()
        (theirs / name / f"{name}.py").write_text(WITH_HELPER.format(name=name))
        (theirs / name / "helper.py").write_text("def multiply(x, w): return x @ w.T\n")
    files = '["mlp/mlp.py", "attention/attention.py"]'
    (theirs / FILE).write_text(f'version = 1\nname = "acme"\nkernels = {files}\nsuite = "smoke"\n')
    git(theirs, "add", "--all")
    git(theirs, "commit", "-q", "-m", "two")
    (theirs / "mlp" / "helper.py").write_text("def multiply(x, w): return 2 * (x @ w.T)\n")
    git(theirs, "commit", "-q", "-a", "-m", "wrong")
    project = open_project(str(theirs))
    base, head = revision(project, "HEAD~1"), revision(project, "HEAD")
    cases = [Case(f"acme.{name}", GemmWorkload(1, 64, 64)) for name in ("mlp", "attention")]

    found = compare_project(project, base, head, cases, device="cpu", rules=RULES)

    wrong = {compared.case.kernel: "elements wrong" in compared.detail for compared in found}
    assert wrong == {"acme.mlp": True, "acme.attention": False}
