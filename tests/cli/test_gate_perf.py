"""`gate perf`: revisions, policy, reports and the exit code. The comparison itself is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.cli.gate_perf import _failing_with
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from flexq_bench.measure import ab as interleave
from flexq_bench.workloads.probes import is_probe

SUITE = 'description = "mine"\n[[group]]\nkernels = ["cublas-fp16"]\nm = "1"\nshapes = ["32x32"]\n'
POLICY = 'version = 1\nsuite = "mine.toml"\nslower_percent = 2\n'


@pytest.fixture
def repository(tmp_path: Path, git) -> Path:
    """Two commits, `base` and HEAD."""
    folder = tmp_path / "repository"
    (folder / "flexq_bench").mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for number in (1, 2):
        (folder / "flexq_bench" / "__init__.py").write_text(f"number = {number}\n")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", f"Change {number}")
        if number == 1:
            git(folder, "tag", "base")
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(SUITE)
    path = tmp_path / "gate.toml"
    path.write_text(POLICY)
    return str(path)


@pytest.fixture
def gate(cli, repository, policy, compared, monkeypatch) -> Callable:
    """gate(1.05, "--markdown", …): the kernel takes 1.05 times as long; None: no result."""

    def run(ratio, *options, **changes):
        def compare(repository, base, head, cases, *, device, seed, rules, on_progress):
            run.rules = rules
            for case in cases if ratio is not None else ():
                steady = is_probe(case.kernel)
                made = compared(case.kernel, 1.0 if steady else ratio, **changes)
                yield replace(made, case=case, base=base, head=head)

        of = "compare_commits" if "--trust-head" in options else "compare_judged"
        monkeypatch.setattr(interleave, of, compare)
        where = ("--repository", str(repository), "--device", "cpu", "--policy", policy)
        return cli("gate", "perf", "--base", "base", *where, *options)

    return run


@pytest.mark.parametrize(
    ("ratio", "changes", "code"),
    [
        (1.0, {}, ExitCode.PASS),
        (1.2, {}, ExitCode.REGRESSION),
        (1.0, {"correct": False}, ExitCode.REGRESSION),
        (1.0, {"base_correct": False}, ExitCode.PASS),
        (1.02, {"noise": 0.05}, ExitCode.AMBIGUOUS),
    ],
)
def test_exit_code_follows_outcome(gate, ratio, changes, code):
    assert gate(ratio, **changes).code == code


def test_fewer_processes_keep_number_of_placements(gate):
    assert gate(1.0, "--processes", "2").code == ExitCode.PASS
    assert (gate.rules.processes, gate.rules.placements) == (2, 3)


def test_gate_compares_floors_but_not_empty_kernel(gate):
    cases = json.loads(gate(1.0, "--json", "-").out)["cases"]

    assert [case["kernel"] for case in cases] == ["read-16", "cublas-fp16"]


def test_reports_are_written(gate, tmp_path):
    files = {name: tmp_path / f"report.{name}" for name in ("md", "xml", "json")}
    options = zip(("--markdown", "--junit", "--json"), map(str, files.values()), strict=True)

    ran = gate(1.2, *(word for pair in options for word in pair))

    assert "failed: " in ran.out
    assert "<!-- flexq-bench gate perf -->" in files["md"].read_text()
    assert "<testsuites" in files["xml"].read_text()
    assert json.loads(files["json"].read_text())["exit_code"] == 1


def test_json_report_on_stdout_moves_messages_to_stderr(gate, repository, git):
    ran = gate(1.2, "--json", "-")

    report = json.loads(ran.out)
    assert report["head"] == git(repository, "rev-parse", "HEAD")
    assert "failed: " in ran.err


def test_only_the_markdown_report_is_on_stdout(gate, tmp_path):
    file = tmp_path / "report.md"
    gate(1.2, "--markdown", str(file))

    ran = gate(1.2, "--markdown", "-")

    assert ran.out == file.read_text()
    assert "failed: " in ran.err


def test_gate_opens_alert_only_with_option(gate, cli):
    gate(1.2)
    assert json.loads(cli("alerts", "list", "--json").out) == []

    ran = gate(1.2, "--alert", seed=2)

    (opened,) = json.loads(cli("alerts", "list", "--json").out)
    assert f"explain {opened['id']}" in ran.out
    assert (opened["family"], opened["bad"]["subject"]) == ("cublas", "Change 2")


def test_comparison_with_itself_stores_noise(gate, cli):
    for seed in range(5):
        assert gate(1.0, "--base", "HEAD", seed=seed).code == ExitCode.PASS

    book = json.loads(cli("list", "noise", "--json").out)
    assert [(row["case"], row["comparisons"]) for row in book] == [
        ("cublas-fp16 gemm cold m1n32k32", 5), ("read-16 gemm cold m1n32k32", 5),
    ]  # fmt: skip
    (rate, *_) = json.loads(cli("list", "false-alarms", "--json").out)
    assert (rate["canaries"], rate["alarms"]) == (10, 0)
    shown = cli("list", "noise").out
    assert "cublas-fp16" in shown  # the table breaks long names where the terminal ends
    assert "%" in shown


@pytest.mark.parametrize(("ratio", "changes"), [(None, {}), (1.0, {"placements": 0})])
def test_gate_without_any_result_is_missing(gate, tmp_path, ratio, changes):
    ran = gate(ratio, "--json", str(tmp_path / "report.json"), **changes)

    assert ran.code == ExitCode.MISSING
    assert "nothing of suite mine could be compared between" in ran.error
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == 4


def test_notes_are_printed_without_comparisons(gate, policy):
    Path(policy).write_text(POLICY + '[[limit]]\nkernels = ["marlin*"]\nslower_percent = 9\n')

    ran = gate(None)

    assert ran.code == ExitCode.MISSING
    assert "limit of marlin* fits no planned case" in ran.out


def test_unknown_revision_is_usage_error(gate):
    ran = gate(1.0, "--head", "mian")

    assert ran.code == ExitCode.USAGE
    assert "no revision 'mian'" in ran.error
    assert "main" in ran.error


def test_local_changes_are_refused(gate, repository):
    (repository / "flexq_bench" / "__init__.py").write_text("edited = True\n")

    ran = gate(1.0)

    assert ran.code == ExitCode.USAGE
    assert "local changes" in ran.error


def test_shallow_clone_without_base_advises_fetch(gate, repository, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", f"file://{repository}", str(clone)], check=True
    )

    ran = gate(1.0, "--repository", str(clone))

    assert ran.code == ExitCode.USAGE
    assert "git fetch --unshallow" in ran.error


def test_policy_with_unknown_key_is_usage_error(gate, policy):
    Path(policy).write_text(POLICY.replace("slower_percent", "slower_percnt"))

    ran = gate(1.0)

    assert ran.code == ExitCode.USAGE
    assert "gate.toml: no key 'slower_percnt' here: the keys are slower_percent" in ran.error


def test_policy_of_head_is_ignored(gate, repository, git):
    """Base has none of this name: the package's counts, whatever head says."""
    folder = repository / "ci" / "policies"
    folder.mkdir(parents=True)
    (folder / "lax.toml").write_text(POLICY.replace("mine.toml", "smoke").replace("2", "99"))
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "Anything goes")

    ran = gate(1.2, "--policy", str(folder / "lax.toml"))

    assert ran.code == ExitCode.USAGE
    assert "has no ci/policies/lax.toml" in ran.error


def test_program_changes_of_head_are_noted(gate):
    ran = gate(1.0, "--json", "-")

    assert json.loads(ran.out)["notes"][0] == (
        "not judged: flexq_bench/__init__.py changed by head; measured with base's"
    )
    assert json.loads(ran.out)["trusts_head"] is False


def test_trusted_head_is_noted(gate, tmp_path):
    report = tmp_path / "report.md"

    ran = gate(1.0, "--trust-head", "--markdown", str(report))

    assert ran.code == ExitCode.PASS
    assert "head was measured with its own program (--trust-head)" in ran.out
    assert "own program" in report.read_text().splitlines()[1]
    assert "not judged" not in ran.out


@pytest.mark.parametrize(
    ("options", "budget_s", "stops"),
    [((), None, True), (("--budget", "5m"), 300.0, True), (("--keep-going",), None, False)],
)
def test_budget_and_wrong_results_end_a_gate_as_requested(gate, options, budget_s, stops):
    assert gate(1.0, *options).code == ExitCode.PASS

    assert (gate.rules.budget_s, gate.rules.stops_at_wrong) == (budget_s, stops)


@pytest.mark.parametrize("budget", ["soon", "0s", "5 parsecs"])
def test_budget_that_is_no_time_is_refused(gate, budget):
    assert gate(1.0, "--budget", budget).code == ExitCode.USAGE


def test_error_of_the_database_comes_with_the_next_progress():
    opening, shown = Future(), []
    show = _failing_with(opening, shown.append)
    show("checking")
    opening.set_exception(UsageError("no such folder"))

    with pytest.raises(UsageError, match="no such folder"):
        show("comparing")

    assert shown == ["checking"]


# The program, but what it does when its first server starts.
AT_START = """
import os, signal, sys
from flexq_bench.cli.app import main
from flexq_bench.measure.launcher import ForkServer

def begun(*arguments):
    BEGUN

ForkServer.begin = begun
sys.exit(main([*sys.argv[2:], "--project", sys.argv[1], "--device", "cpu"]))
"""
GATE = ("gate", "perf", "--base", "HEAD~1")
BISECTION = ("bisect", "acme.fast gemm cold m1n64k64", "--good", "HEAD~1", "--bad", "HEAD")


@pytest.fixture
def at_start(tmp_path, git) -> Callable[..., subprocess.CompletedProcess[str]]:
    """at_start(begun, *arguments): a command in a project of two commits."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "fast.py").touch()
    file = 'version = 1\nname = "acme"\nkernels = ["fast.py"]\nsuite = "smoke"\n'
    (tmp_path / "flexq-bench.toml").write_text(file)
    git(tmp_path, "add", "--all")
    for message in ("base", "head"):
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", message)

    def run(begun: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = AT_START.replace("BEGUN", begun)
        command = [sys.executable, "-c", program, str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


# Servers and the judge import as long: one after the other, a start takes twice as long.
@pytest.mark.parametrize(
    "arguments",
    [GATE, pytest.param(BISECTION, marks=pytest.mark.slow)],
    ids=["gate", "bisection"],
)
def test_servers_start_before_the_judge_imports_torch(at_start, arguments):
    imported = 'print("imported:", sys.modules.keys() & {"torch", "numpy"}, flush=True)'

    ran = at_start(f"{imported}; os._exit(0)", *arguments)

    assert ran.stdout == "imported: set()\n", ran.stderr


def test_sigterm_while_servers_start_interrupts_a_gate(at_start):
    ran = at_start("os.kill(os.getpid(), signal.SIGTERM)", *GATE)

    assert ran.returncode == INTERRUPTED, ran.stderr
