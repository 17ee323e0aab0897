"""Projects whose folder was moved, and the variables that their files name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.repository.project import FILE, open_project, project_notes
from flexq_bench.repository.project_builds import built_tree
from flexq_bench.workloads.errors import WorkloadError

TOML = 'version = 1\nname = "Acme_Kernels"\nkernels = ["fast.py"]\nsuite = "smoke"\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))


def test_moved_project_is_found_by_name(made):
    """Where it lay before, another project may have come to lie."""
    before = made.git("rev-parse", "HEAD")
    (made.path / "libs" / "of gemms").mkdir(parents=True)
    made.git("mv", FILE, "fast.py", "libs/of gemms")
    (made.path / "other").mkdir()
    (made.path / "other" / FILE).write_text(TOML.replace('name = "', 'name = "another-'))
    after = made.commit()
    moved = open_project(str(made.path / "libs" / "of gemms"))

    assert moved.at(before).inside == Path()
    assert moved.at(before).at(after).inside == Path("libs/of gemms")
    assert moved.at(before).moved_to(after).file == moved.at(before).file
    assert project_notes(moved.at(before), before, after) == ()
    (made.path / "libs" / "of gemms" / FILE).write_text(TOML.replace("smoke", "nightly"))
    assert project_notes(moved.at(before), before, made.commit()) == (
        f"not judged: {FILE}, libs/of gemms/{FILE} changed by head; base's are used",
    )
    with pytest.raises(WorkloadError, match=f"^{before[:10]} has no other/{FILE}: commit it"):
        open_project(str(made.path / "other")).at(before)


def test_builds_have_the_variables_of_the_project_file(made, monkeypatch):
    monkeypatch.setenv("ACME_MODE", "of the shell")
    monkeypatch.setenv("ACME_OTHER", "of the shell")
    text = f'{TOML}[variables]\nACME_MODE = "of the file"\n'
    built = '[build]\ncommand = "echo $ACME_MODE, $ACME_OTHER > said"\n'
    sha = made.commit(**{"flexq-bench_toml": text + built})
    project = open_project(str(made.path))

    with clean_environment() as variables:
        tree = built_tree(project, sha, variables=variables)
        assert (tree.folder / "said").read_text() == "of the file,\n"
        assert tree.environment(variables)["ACME_MODE"] == "of the file"
    tree = built_tree(project, sha)
    assert (tree.folder / "said").read_text() == "of the file, of the shell\n"
    made.commit(**{"flexq-bench_toml": text.replace("of the file", "another") + built})
    again = built_tree(open_project(str(made.path)), sha)
    assert (again.folder / "said").read_text() == "another, of the shell\n"


@pytest.mark.parametrize("name", ["PYTHONPATH", "FLEXQ_BENCH_DB", "A-B", ""])
def test_reserved_or_malformed_variables_are_refused(made, name):
    (made.path / FILE).write_text(f'{TOML}[variables]\n"{name}" = "x"\n')

    with pytest.raises(WorkloadError, match=f"{FILE}: variables: {name} is set by flexq-bench, or"):
        open_project(str(made.path))
