"""The tree in which head is measured: files of head, and files of base."""

from __future__ import annotations

import pytest

from flexq_bench.measure.ab.judged_tree import judged_tree
from flexq_bench.measure.ab.revisions import RevisionError

FILES = {
    "flexq_bench/measure/clocks.py": "base\n",
    "kernels/__init__.py": "base\n",
    "kernels/reference.py": "base\n",
    "kernels/formats/symmetric.py": "base\n",
    "kernels/cpu/dense.py": "base\n",
    "kernels/cpu/old.py": "base\n",
    "kernels/csrc/flexq.cu": "base\n",
    "workloads/suites/smoke.toml": "base\n",
}


@pytest.fixture
def write(repository):
    def write(**files: str | None) -> str:
        for path, text in files.items():
            file = repository.path / path
            if text is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        repository.git("add", "--all", "--force")
        repository.git("commit", "-q", "--allow-empty", "-m", "change")
        return repository.git("rev-parse", "HEAD")

    return write


@pytest.fixture
def base(write):
    return write(**FILES)


@pytest.fixture
def contents(repository):
    """Files of a tree, by path."""

    def read(tree) -> dict[str, str]:
        listed = repository.git("ls-tree", "-r", "-z", "--name-only", tree.commit)
        return {
            path: repository.git("show", f"{tree.commit}:{path}")
            for path in listed.split("\0")
            if path
        }

    return read


def test_kernels_are_heads_and_what_judges_them_is_bases(repository, base, write, contents):
    edited = {path: "head\n" for path in FILES if path != "kernels/cpu/old.py"}
    head = write(**edited, **{"kernels/cpu/old.py": None, "kernels/cuda/new.py": "head\n"})

    found = contents(judged_tree(repository.path, base, head))

    assert {path for path, text in found.items() if text == "head"} == {
        "kernels/cpu/dense.py", "kernels/csrc/flexq.cu", "kernels/cuda/new.py",
    }  # fmt: skip
    assert set(found) == FILES.keys() - {"kernels/cpu/old.py"} | {"kernels/cuda/new.py"}


@pytest.mark.parametrize(
    "path",
    [
        "kernels/reference/__init__.py",
        "kernels/reference.cpython-312-x86_64-linux-gnu.so",
        "kernels/formats.so",
        "kernels/contract.pyc",
        "kernels/__pycache__/reference.cpython-312.pyc",
        "kernels/cpu/__pycache__/dense.cpython-312.pyc",
        "kernels/.gitattributes",
        "kernels/cpu/.gitattributes",
        "kernels.py",
        "sitecustomize.py",
        "torch/__init__.py",
    ],
)
def test_nothing_of_head_stands_before_what_judges(repository, base, write, contents, path):
    head = write(**{path: "head\n"})

    assert path not in contents(judged_tree(repository.path, base, head))


def test_names_of_any_characters_are_heads(repository, base, write, contents):
    names = (
        "é",
        "e\u0301",
        "a\nb",
        "-rf",
        "\u202egnp",
        "a\\b",
        "$(id)",
        "'\"",
        "\x1b]0;x\x07",
    )
    paths = {f"kernels/cpu/{name}.py" for name in names}
    head = write(**dict.fromkeys(paths, "head\n"))

    tree = judged_tree(repository.path, base, head)

    assert {path for path, text in contents(tree).items() if text == "head"} == paths
    assert not tree.notes


def test_a_link_is_left_out_and_said(repository, base, write, contents):
    (repository.path / "kernels/cpu/link.py").symlink_to("/etc/passwd")
    head = write()

    tree = judged_tree(repository.path, base, head)

    assert "kernels/cpu/link.py" not in contents(tree)
    (note,) = tree.notes
    assert note.startswith("left out: kernels/cpu/link.py of head")


def test_what_head_changes_of_the_program_is_said(repository, base, write):
    repository.git("checkout", "-q", "-b", "topic")
    many = {f"workloads/suites/{name}.toml": "head\n" for name in "abcdef"}
    edited = {"flexq_bench/measure/clocks.py": "head\n", "kernels/cpu/dense.py": "head\n"}
    head = write(**edited, **many)
    repository.git("checkout", "-q", "main")
    later = write(**{"db/engine.py": "of base, after head left it\n"})

    (note,) = judged_tree(repository.path, later, head).notes

    assert note == (
        "not judged: flexq_bench/measure/clocks.py, workloads/suites/a.toml, "
        "workloads/suites/b.toml, workloads/suites/c.toml, workloads/suites/d.toml and 2 more "
        "changed by head; measured with base's"
    )


def test_a_name_cannot_write_to_the_terminal(repository, base, write):
    head = write(**{"flexq_bench/\x1b[31mred.py": "head\n"})

    (note,) = judged_tree(repository.path, base, head).notes

    assert "\x1b" not in note


@pytest.mark.parametrize(
    ("path", "runs"),
    [
        ("kernels/csrc/flexq.cu", False),
        ("kernels/csrc/generate.py", True),
        ("kernels/cpu/dense.py", True),
        ("workloads/suites/smoke.toml", False),
    ],
)
def test_code_of_head_runs_where_more_than_device_code_differs(repository, base, write, path, runs):
    head = write(**{path: "head\n"})

    assert judged_tree(repository.path, base, head).runs_code_of_head is runs


def test_head_that_changes_no_kernel_is_measured_as_base(repository, base, write):
    head = write(**{"flexq_bench/measure/clocks.py": "head\n"})

    assert judged_tree(repository.path, base, head).commit == base
    assert judged_tree(repository.path, base, base).notes == ()


def test_commits_across_the_move_of_packages_are_refused(repository, base, write):
    (repository.path / "flexq_bench" / "kernels").symlink_to("../kernels")
    oldest = write()
    head = write(**{"kernels/cpu/dense.py": "head\n"})
    message = f"^{base[:10]} is from before {oldest[:10]}, the oldest commit with flexq_bench/kern"

    for pair in ((base, head), (head, base)):
        with pytest.raises(RevisionError, match=message):
            judged_tree(repository.path, *pair)
    assert judged_tree(repository.path, oldest, head).notes == ()


def test_hooks_of_the_repository_do_not_run(repository, base, tmp_path):
    from flexq_bench.repository.worktrees import worktree

    hooks = repository.path / "hooks"
    hooks.mkdir()
    (hooks / "post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    (hooks / "post-checkout").chmod(0o755)
    repository.git("config", "core.hooksPath", "hooks")

    with worktree(repository.path, base):
        pass

    assert not (tmp_path / "ran").exists()
