"""A checkpoint that a person approved as the reference of later checkpoints of its formats."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.accuracy.approved import ApprovedReference
from flexq_bench.cli.app import main
from flexq_bench.exit_codes import ExitCode

POLICY = """
version = 1
schemes = ["w6a6"]
max_tokens = 1275

[fidelity]
text = "heldout"
percent = 0.4
kl_percent = 8
approvers = ["Ada"]
approval_days = {days}
"""


def swap_rows(operand):
    values = operand.values.clone()
    values[[0, 1]] = values[[1, 0]]
    return replace(operand, values=values)


def command(tiny_llama, folder, checkpoint, *options, days=30):
    policy = folder / "mine.toml"
    policy.write_text(POLICY.format(days=days))
    return (
        *("gate", "accuracy", "--model", str(tiny_llama), "--checkpoint", str(checkpoint)),
        *("--policy", str(policy), "--data", str(tiny_llama / "heldout.txt")),
        *("--device", "cpu", "--no-diagnosis", "--json", "-", *map(str, options)),
    )


@pytest.fixture
def gate(cli, tiny_llama, tmp_path):
    """gate(checkpoint, "--approved", file): exit code, and the report."""

    def run(checkpoint, *options, **of_policy):
        ran = cli(*command(tiny_llama, tmp_path, checkpoint, *options, **of_policy))
        return ran.code, json.loads(ran.out) if ran.out else ran.error

    return run


@pytest.fixture(scope="module")
def once(tiny_llama, tmp_path_factory):
    """A folder with a checkpoint and the file of its approval, by Ada."""
    folder = tmp_path_factory.mktemp("approved")
    checkpoint = folder / "calibrated"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXQ_BENCH_DB", str(folder / "flexq.sqlite"))
        quantized = main(
            (
                *("quantize", str(tiny_llama), "--scheme", "smoothquant-w8a8"),
                *("--calibration", str(tiny_llama / "calibration.txt")),
                *("--calibration-segments", "2", "--calibration-length", "64"),
                *("--out", str(checkpoint), "--device", "cpu"),
            )
        )
        assert quantized == ExitCode.PASS
        approval = ("--approve", folder / "approved.json", "--approver", "Ada")
        # Approving changes no outcome.
        assert main(command(tiny_llama, folder, checkpoint, *approval)) == ExitCode.MISSING
    return folder


@pytest.fixture
def calibrated(once):
    """A checkpoint whose quantization can't be repeated without the calibration text."""
    return once / "calibrated"


@pytest.fixture
def approved(once, tmp_path):
    """A copy of the file of its approval."""
    return Path(shutil.copy(once / "approved.json", tmp_path))


def outcomes(report):
    return {check["outcome"] for check in report["checks"]}


def test_approved_checkpoint_passes_and_damaged_copy_fails(gate, calibrated, approved, damaged):
    code, report = gate(calibrated, "--approved", approved)
    assert code == ExitCode.PASS
    assert [check["change"] for check in report["checks"]] == [0, 0]
    assert "approved by Ada" in report["approved_reference"]
    code, report = gate(damaged(calibrated, swap_rows), "--approved", approved)
    assert code == ExitCode.REGRESSION, report["checks"]


@pytest.mark.slow
def test_checkpoint_with_other_formats_is_not_judged_by_an_approval(gate, approved, checkpoint):
    code, report = gate(checkpoint, "--approved", approved)
    assert code == ExitCode.MISSING
    assert outcomes(report) == {"not judged"}
    assert all("other formats" in check["reason"] for check in report["checks"])


@pytest.mark.parametrize(
    ("change", "days", "reason"),
    [
        ({"approved_at": "2020-01-01T00:00:00+00:00"}, 30, "valid for 30 days"),
        ({"approved_by": "Bob"}, 30, "names Ada as approvers, not Bob"),
    ],
)
def test_policy_says_who_approves_and_for_how_long(
    gate, calibrated, approved, change, days, reason
):
    replace(ApprovedReference.read(approved), **change).write(approved)
    code, report = gate(calibrated, "--approved", approved, days=days)
    assert code == ExitCode.MISSING
    assert all(reason in check["reason"] for check in report["checks"])


def test_edited_approval_and_approval_of_a_scheme_are_refused(
    gate, calibrated, approved, cli, tiny_llama
):
    content = json.loads(approved.read_text())
    content["approved_by"] = "Eve"
    approved.write_text(json.dumps(content))
    code, error = gate(calibrated, "--approved", approved)
    assert (code, "hash" in error) == (ExitCode.USAGE, True)
    code, error = gate(calibrated, "--approve", approved)
    assert (code, "--approver" in error) == (ExitCode.USAGE, True)
    ran = cli(
        *("gate", "accuracy", "--model", str(tiny_llama), "--approved", str(approved)),
        *("--data", f"wikitext={tiny_llama / 'heldout.txt'}"),
    )
    assert ran.code == ExitCode.USAGE
