"""The command `gate static`."""

from __future__ import annotations

import html
import json
import re

import pytest

from flexq_bench.cli.app import main
from flexq_bench.exit_codes import ExitCode


@pytest.fixture
def gate(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str):
        capsys.readouterr()
        place = ("--repository", str(repository.folder), "--targets", "sm_86,sm_90")
        code = main(("gate", "static", *place, *arguments))
        return code, capsys.readouterr()

    return run


def test_spill_is_a_regression_in_every_report(repository, gate, tmp_path):
    repository.commit(threads=256, count=100)
    repository.commit(threads=1024, count=100)
    comment = tmp_path / "comment.md"

    code, printed = gate("--base", "HEAD~1", "--head", "HEAD", "--markdown", str(comment))
    json_code, machine = gate("--base", "HEAD~1", "--json", "-")

    assert (code, json_code) == (ExitCode.REGRESSION, ExitCode.REGRESSION)
    found = json.loads(machine.out)
    spills = [c for c in found["changes"] if c["metric"]["name"] == "spill_bytes"]
    assert {c["function"]["target"] for c in spills} == {"sm_86", "sm_90"}
    assert all(c["verdict"] == "worse" and c["head"] > c["base"] == 0 for c in spills)
    assert found["exit_code"] == 1
    for text in (printed.out, html.unescape(comment.read_text())):
        assert "1 regression of the machine code" in text
        assert "sm_86, sm_90" in text
        assert "tiny-w6a6" in text
    assert comment.read_text().startswith("## Static gate\n")


def test_no_difference_passes_and_lists_the_builds(repository, gate):
    repository.commit()
    repository.commit()

    code, printed = gate("--base", "HEAD~1")

    assert code == ExitCode.PASS
    assert "no regression of the machine code" in printed.out
    assert "builds for sm_86, sm_90: 2 of unchanged sources" in printed.out


def test_build_that_does_not_compile_is_a_missing_result(repository, gate):
    repository.commit()
    repository.commit(source="oops\n")

    code, printed = gate("--base", "HEAD~1")

    assert code == ExitCode.MISSING
    assert "does not compile for 2 builds" in printed.out
    assert "tiny.cu COUNT=16 for sm_86: " in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base", "mane"), "no revision 'mane' in .*: there are main"),
        (("--base", "main", "--kernels", "tiny-w6a7"), "'tiny-w6a7': there is tiny-w6a6"),
        (("--base", "main", "--targets", "sm_68"), "no target 'sm_68': there are sm_8"),
        (("--base", "main", "--markdown", "no/such/folder.md"), "there is no folder"),
        (("--base", "main", "--repository", "/"), "/ is not in a git repository"),
    ],
)
def test_invalid_arguments_are_one_line(repository, gate, arguments, message):
    repository.commit()

    code, printed = gate(*arguments)

    assert code == ExitCode.USAGE
    (line,) = printed.err.splitlines()
    assert re.search(message, line), line


def test_local_changes_are_one_line(repository, gate):
    repository.commit()
    repository.write("kernels/registry.py", "changed\n")

    code, printed = gate("--base", "HEAD")

    assert code == ExitCode.USAGE
    assert "has local changes" in printed.err
    assert len(printed.err.splitlines()) == 1
