"""Cases with the same code in two commits."""

from __future__ import annotations

import shutil

import pytest

from flexq_bench.measure.ab import compare_judged
from flexq_bench.measure.ab.experiment import ABExperiment
from flexq_bench.measure.ab.judged_tree import judged_tree
from flexq_bench.measure.ab.same_code import (
    compare_briefly,
    is_same_project,
    same_code,
    without_measurement,
)
from flexq_bench.repository.project import FILE, open_project, revision
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from tests.measure.ab.conftest import CASE, ROOT, RULES

LAUNCHER = '''"""Launches a kernel."""

THREADS = 128


def launch(x, y):
    """y = x."""
    return x + THREADS
'''
DEVICE = """// A copy.
#include "common/types.cuh"
constexpr int THREADS = 128;  // of a block
extern "C" __global__ void copy(int* y) { printf("// %d", *y); }
"""
FILES = {"kernels/cuda/copy.py": LAUNCHER, "kernels/csrc/copy.cu": DEVICE, "kernels/t.json": "1"}
CASES = tuple(
    Case(kernel, GemmWorkload(m, 64, 64)) for kernel in ("flexq-w6a6", "abq-w2a8") for m in (1, 8)
)


@pytest.fixture
def commit(repository):
    def commit(**files: str) -> str:
        for path, text in files.items():
            file = repository.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        repository.git("add", "--all", "--force")
        repository.git("commit", "-q", "--allow-empty", "-m", "a change")
        return repository.git("rev-parse", "HEAD")

    return commit


@pytest.fixture
def same_after(repository, commit):
    """The cases that are the same after files of FILES get other texts."""

    def run(*, is_cpu=True, **files: str):
        base = commit(**FILES)
        tree = judged_tree(repository.path, base, commit(**files))
        return same_code(repository.path, base, tree.commit, tree.changed, CASES, is_cpu=is_cpu)

    return run


def test_file_that_expands_is_not_compared(same_after):
    path = "kernels/cuda/copy.py"
    assert not same_after(**{path: FILES[path] + "\n" * (1 << 20)})


@pytest.mark.parametrize(
    "files",
    [
        {"README.md": "other\n"},
        {"kernels/cuda/copy.py": LAUNCHER.replace('"""y = x."""', "# y is x\n\n    ")},
        {"kernels/csrc/copy.cu": DEVICE.replace("// A copy.", "/* A\n   copy */\n")},
        {"kernels/csrc/copy.cu": DEVICE.replace("  // of a block", " /* of */ // a block \\\n")},
    ],
)
def test_texts_that_no_compiler_sees_leave_the_code_the_same(same_after, files):
    assert same_after(is_cpu=False, **files) == frozenset(CASES)


@pytest.mark.parametrize(
    "files",
    [
        {"kernels/cuda/copy.py": LAUNCHER.replace("128", "64")},
        {"kernels/cuda/copy.py": LAUNCHER + "x ="},
        {"kernels/cuda/copy.py": f"{LAUNCHER}{'-' * 200_000}1"},  # too deep for the parser
        {"kernels/cuda/new.py": ""},
        {"kernels/t.json": "2"},
    ],
)
def test_change_of_code_on_the_host_counts_for_all_cases(same_after, files):
    assert same_after(**files) == frozenset()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= 128", "= 64"),
        ('"// %d"', '"// %i"'),
        ("= 128;  // of a block", "= 128 // of a block\n;"),
        ('"// %d"', '"//  %d"'),
        ("// A copy.", "// A copy. \\"),
        ("// A copy.", "// A copy. \\ "),  # one line for some compilers
        ("// A copy.", "// A copy.\r#undef NDEBUG"),
        ("// A copy.\n", "// A copy.\r"),  # what follows is its comment, for some compilers
        ("// A copy.", "/*" * 100_000),
        ("// A copy.", '"' + r"\"" * 100_000),
        ("// A copy.", "int line = __LINE__; // A copy."),
    ],
)
def test_change_of_device_code_is_one_for_gpus_alone(same_after, monkeypatch, old, new):
    monkeypatch.setattr(
        "flexq_bench.measure.ab.same_code._kernels_that_compile",
        lambda repository, base, head, changed: frozenset({"flexq-w6a6"} if changed else ()),
    )
    changed = {"kernels/csrc/copy.cu": DEVICE.replace(old, new)}

    assert same_after(is_cpu=False, **changed) == frozenset(CASES[2:])
    assert same_after(**changed) == frozenset(CASES)


@pytest.mark.slow  # lists all builds
def test_device_code_counts_for_the_kernels_that_compile_it(repository, commit):
    for room in ("workloads", "kernels", "flexq_bench", "db"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, repository.path / room, ignore=ignored, symlinks=True)
    base = commit()
    path = "kernels/csrc/abq/gemm.cu"
    head = commit(**{path: (ROOT / path).read_text() + "\n__device__ int more;\n"})
    tree = judged_tree(repository.path, base, head)

    same = same_code(repository.path, base, tree.commit, tree.changed, CASES, is_cpu=False)

    assert same == frozenset(CASES[:2])


def test_a_tenth_of_the_same_cases_is_measured():
    cases = [Case("flexq-w6a6", GemmWorkload(m, 64, 64)) for m in range(1, 1001)]

    unmeasured = without_measurement(cases, "a" * 40, "b" * 40)

    assert 850 < len(unmeasured) < 950
    assert unmeasured.keys() == without_measurement(cases[::-1], "a" * 40, "b" * 40).keys()
    assert unmeasured.keys() != without_measurement(cases, "a" * 40, "c" * 40).keys()
    assert {result.confirmation.verdict for result in unmeasured.values()} == {"same"}


def test_judged_comparison_measures_few_cases_of_the_same_code(repository, commit, command):
    repository.write(refuse="not this case")
    base = commit(**FILES)
    head = commit(**{"kernels/csrc/copy.cu": DEVICE.replace("A copy", "One copy")})
    cases = [Case("flexq-w6a6", GemmWorkload(m, 64, 64)) for m in range(1, 121)]

    results = list(
        compare_judged(
            repository.path, base, head, cases, device="cpu", rules=RULES, command=command
        )
    )

    assert {result.case for result in results} == set(cases)
    measured = [result for result in results if "not this case" in result.detail]
    assert 0 < len(measured) < 40
    assert {r.confirmation.verdict for r in results if r not in measured} == {"same"}


COMMENTED = "# %s\nx = 1\n"


@pytest.mark.parametrize(
    ("path", "text", "is_same"),
    [
        ("README.md", COMMENTED, True),
        ("k.py", COMMENTED, True),
        ("k.cu", "// %s\nint x = 1;\n", True),
        ("k.py", "x = '%s'\n", False),
        ("k.cu", "int %s = 1;\n", False),
        ("setup.cfg", COMMENTED, False),
        ("%s.md", "text", True),
        ("%s.py", "x = 1\n", False),
    ],
)
def test_project_is_the_same_if_only_texts_and_comments_changed(tmp_path, git, path, text, is_same):
    (tmp_path / FILE).write_text(
        'version = 1\nname = "acme"\nkernels = ["k.py"]\nsuite = "smoke"\n'
    )
    (tmp_path / "k.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q", "-b", "main")
    for word in ("one", "two"):
        (tmp_path / path.replace("%s", word)).write_text(text.replace("%s", word))
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "-q", "-m", word)
    project = open_project(str(tmp_path))

    commits = (revision(project, name) for name in ("HEAD~1", "HEAD"))

    assert is_same_project(project, *commits) is is_same


@pytest.mark.parametrize(("us", "labels"), [(100, [CASE.label]), (105, [])], ids=["same", "slower"])
def test_the_same_code_is_measured_in_one_pair_of_processes(a_tree, command, us, labels):
    base, head = a_tree("base"), a_tree("head", us=us)
    experiment = ABExperiment(base, head, device="cpu", command=command)

    found = list(compare_briefly([(experiment, [(CASE, CASE)])]))

    assert [result.case.label for result in found] == labels
    assert (base.tree / "starts").read_text() == "x"


def test_probes_of_the_same_code_are_not_measured():
    probes = [Case.from_key(f"read-6 gemm cold m1n{64 * n}k64") for n in range(1, 100)]

    assert without_measurement(probes, "a" * 40, "b" * 40).keys() == set(probes)
