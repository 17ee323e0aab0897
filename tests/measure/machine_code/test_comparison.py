"""Comparison of the machine code of two revisions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flexq_bench.ci.gate_static import Limits, StaticReport, gate_static
from flexq_bench.errors import InfrastructureError, UsageError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def compare(repository, tmp_path, monkeypatch):
    # Worktrees and machine code of these tests stay out of the person's own cache.
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))

    def run(base: str, head: str, **options) -> StaticReport:
        options = {"targets": ("sm_86",)} | options
        report = gate_static(repository.folder, base, head, **options)
        assert len(repository.git("worktree", "list").splitlines()) == 1
        assert list((tmp_path / "cache" / "worktrees").iterdir()) == []
        return report

    return run


def worse(report):
    found = [c for c in report.changes if c.verdict == "worse"]
    return {(c.function.target, c.function.name, c.metric.name): (c.base, c.head) for c in found}


def test_change_that_spills_is_a_regression(repository, compare):
    base = repository.commit(threads=256, count=100)
    # So many threads have 64 registers each, and keep 100 values.
    head = repository.commit(threads=1024, count=100)

    found = worse(compare(base, head))

    before, after = found["sm_86", "tiny", "spill_bytes"]
    assert before == 0
    assert after > 0


def test_spill_of_the_base_is_no_regression(repository, compare):
    base = repository.commit(threads=1024, count=100)
    head = repository.commit(threads=1024, count=100, source=f"{repository.source}// end\n")

    report = compare(base, head)

    assert (report.same_source, report.same_code, report.changes) == (0, 1, ())


def test_new_build_that_spills_is_a_regression(repository, compare):
    base = repository.commit(threads=1024, count=16)
    head = repository.commit(threads=1024, count=100)

    report = compare(base, head)

    assert (report.added, report.removed) == (1, 1)
    assert worse(report)["sm_86", "tiny", "spill_bytes"][0] is None


def test_moved_source_is_compared_with_its_old_path(repository, compare):
    base = repository.commit()
    head = repository.commit(path="engine/gemm.cu")

    report = compare(base, head)

    assert (report.added, report.removed, report.same_code) == (0, 0, 1)
    assert report.changes == ()


def test_spill_of_a_moved_source_has_a_base(repository, compare):
    base = repository.commit(threads=256, count=100)
    head = repository.commit(threads=1024, count=100, path="engine/gemm.cu")

    report = compare(base, head)

    assert (report.added, report.removed, report.differing) == (0, 0, 1)
    before, after = worse(report)["sm_86", "tiny", "spill_bytes"]
    assert before == 0
    assert after > 0


@pytest.mark.slow
def test_more_shared_memory_is_worse_if_it_costs_a_block(repository, compare):
    base = repository.commit(shared=16 * 1024)
    head = repository.commit(shared=24 * 1024)

    report = compare(base, head, targets=("sm_86", "sm_90"))

    # With the system's 1 KB: 5 and 4 blocks of 100 KB, 13 (8 for their threads) and 9 of 228 KB.
    assert worse(report) == {("sm_86", "tiny", "warps_per_sm"): (40, 32)}
    assert compare(base, head, limits=Limits(occupancy_loss=50)).is_regression is False


def test_shared_memory_beyond_the_maximum_is_always_worse(repository, compare):
    base = repository.commit(shared=16 * 1024)
    head = repository.commit(shared=100 * 1024)

    found = worse(compare(base, head, limits=Limits(occupancy_loss=100)))

    assert found == {("sm_86", "tiny", "warps_per_sm"): (40, 0)}


@pytest.mark.slow
def test_architecture_specific_build_is_compiled_for_its_target_only(repository, compare):
    base = repository.commit(threads=256, only_sm=90)
    head = repository.commit(threads=512, only_sm=90)

    report = compare(base, head, targets=("sm_86", "sm_90", "sm_100"))

    assert (report.broken, report.differing) == ((), 1)


def test_equal_sources_are_not_compiled(repository, compare):
    base = repository.commit()
    repository.write("notes.txt", "what has nothing to do with it")
    head = repository.commit()
    steps = []

    report = compare(base, head, on_progress=lambda done, total: steps.append((done, total)))

    assert (report.same_source, steps, report.is_regression) == (1, [], False)


def test_changed_header_changes_the_source(repository, compare):
    base = repository.commit()
    repository.write("kernels/csrc/tiny.cuh", "constexpr int THREADS = 128;\n")
    repository.git("commit", "-q", "-a", "-m", "header")

    report = compare(base, "HEAD")

    assert (report.same_source, report.same_code, report.differing) == (0, 0, 1)


def test_instructions_are_worse_only_beyond_a_limit(repository, compare):
    base = repository.commit()
    twice = repository.source.replace("kept[i] * kept", "kept[i] * kept[0] * kept")
    head = repository.commit(source=twice)

    report = compare(base, head)
    strict = compare(base, head, limits=Limits(instruction_growth=10))

    (multiplies,) = [c for c in report.changes if c.metric.name == "sass_float"]
    assert (multiplies.base, multiplies.head, multiplies.verdict) == (16, 32, "changed")
    assert not report.is_regression
    assert ("sm_86", "tiny", "sass_float") in worse(strict)


def test_head_build_that_does_not_compile_is_missing(repository, compare):
    base = repository.commit()
    head = repository.commit(source="extern int undeclared() { return oops; }\n")

    report = compare(base, head)

    (broken,) = report.broken
    assert "oops" in broken.error
    assert broken.kernels == ("tiny-w6a6",)


def test_spill_is_found_if_the_base_does_not_compile(repository, compare):
    base = repository.commit(threads=1024, count=100, source="oops\n")
    head = repository.commit(threads=1024, count=100)

    report = compare(base, head)

    assert ("sm_86", "tiny", "spill_bytes") in worse(report)
    assert report.uncompared == 1


def test_revision_that_cannot_be_imported_is_one_line(repository, compare):
    base = repository.commit()
    repository.write("kernels/errors.py", "import what_is_not_there\n")
    head = repository.commit()

    with pytest.raises(InfrastructureError, match=rf"head {head[:10]} can't list.*not_there"):
        compare(base, head)


def test_unknown_kernel_is_refused(repository, compare):
    repository.commit()
    registry = (repository.folder / "kernels" / "registry.py").read_text()
    slow = registry.replace("return [BUILD]", "raise RuntimeError('builds were listed')")
    repository.write("kernels/registry.py", slow)
    repository.git("commit", "-q", "-am", "listing builds takes long")

    # Labels are enough to refuse it.
    with pytest.raises(UsageError, match="'tiny-w6a8': there is tiny-w6a6"):
        compare("HEAD", "HEAD", patterns=("tiny-w6a8",))


def test_local_changes_on_top_of_the_head_are_refused(repository, compare):
    head = repository.commit()
    repository.write("kernels/csrc/tiny.cu", "changed\n")

    with pytest.raises(UsageError, match=f"local changes that {head[:10]} has not"):
        compare(head, "HEAD")
    assert compare(head, head).same_source == 1


def test_local_changes_are_judged_for_the_working_tree(repository, compare):
    base = repository.commit(threads=256, count=100)
    repository.write("kernels/csrc/tiny.cuh", "constexpr int THREADS = 1024;\n")

    report = compare(base, ".")

    assert ("sm_86", "tiny", "spill_bytes") in worse(report)
    assert report.head == f"{base}-dirty"


@pytest.mark.slow
def test_spill_in_a_source_of_this_project_is_found(repository, compare):
    for package in ("kernels", "workloads"):
        shutil.copytree(
            ROOT / package,
            repository.folder / package,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    repository.git("add", ".")
    repository.git("commit", "-q", "-m", "as it is")
    source = repository.folder / "kernels" / "csrc" / "abq" / "gemm.cu"
    bounds = "__launch_bounds__(WARPS * 32, 1)"
    assert bounds in source.read_text()
    # An SM has 65536 registers: eight blocks of 256 threads leave each thread 32.
    source.write_text(source.read_text().replace(bounds, "__launch_bounds__(WARPS * 32, 8)"))
    repository.git("commit", "-q", "-a", "-m", "eight blocks")

    report = compare("HEAD~1", "HEAD", patterns=("abq-w6a6",))

    spilling = {change.function.name for change in report.changes if change.verdict == "worse"}
    assert spilling == {"abq"}
    assert report.same_source >= 1
    assert report.differing > 5
    assert report.broken == ()
