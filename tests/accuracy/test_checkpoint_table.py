"""The table of checkpoints on tiny-llama: what is judged is what decodes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from flexq_bench.stats import is_clear, mean_difference_interval

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "checkpoints.py"
QUICK = ("w8a16", "fp6")  # whose kernels are fast on a CPU
_SPEC = importlib.util.spec_from_file_location("checkpoints", SCRIPT)
checkpoints = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(checkpoints)


def rows(tiny_llama, out, *options):
    data = ("--model", str(tiny_llama), "--data", str(tiny_llama / "heldout.txt"))
    calibration = ("--calibration", str(tiny_llama / "calibration.txt"), "--segments", "8")
    sizes = ("--context", "256", "--prompt", "32", "--new", "16", "--device", "cpu")
    checkpoints.main((*data, *calibration, *sizes, "--out", str(out), *options))
    return [json.loads(line) for line in out.read_text().splitlines()]


def differs(row):
    """Return True if perplexities clearly differ, by 0.1 % at least.

    Where inputs are rounded to 6 bits, sums in another order give other codes now and then.
    """
    interval = mean_difference_interval(row["reference_nll"], row["kernels_nll"], seed=0)
    return abs(row["kernels"] / row["reference"] - 1) >= 1e-3 and is_clear(interval)


def test_interrupted_call_is_continued(tiny_llama, tmp_path, capsys, monkeypatch):
    out, kept = tmp_path / "rows.jsonl", tmp_path / "kept"
    kept.mkdir()
    options = ("--max-tokens", "255", "--checkpoints", str(kept), "--schemes")
    (whole,) = rows(tiny_llama, out, *options, "w8a16")
    out.write_text("")  # as if it had ended behind quantizing

    assert rows(tiny_llama, out, "--seconds", "0", *options, "w8a16") == []
    assert "w8a16: left for the next call" in capsys.readouterr().err
    monkeypatch.delattr(checkpoints, "quantize_checkpoint")
    (again,) = rows(tiny_llama, out, *options, "w8a16")
    assert again["content_hash"] == whole["content_hash"]
    assert again["kernels"] == whole["kernels"]


@pytest.mark.parametrize(
    ("schemes", "segments"),
    [
        pytest.param(QUICK, 2, id="quick"),
        pytest.param(checkpoints.SCHEMES, 8, id="all", marks=pytest.mark.slow),
    ],
)
def test_kernels_reference_and_decode_agree_on_a_checkpoint(
    tiny_llama, tmp_path, capsys, schemes, segments
):
    found = rows(
        tiny_llama,
        tmp_path / "rows.jsonl",
        *("--max-tokens", str(255 * segments), "--schemes", *schemes),
    )
    assert [row["scheme"] for row in found] == list(schemes)
    measured = [row for row in found if not row["no_kernel"]]
    apart = {r["scheme"]: 100 * (r["kernels"] / r["reference"] - 1) for r in measured if differs(r)}
    assert apart == {}
    assert {r["scheme"]: r["equal_tokens"] for r in measured} == {
        row["scheme"]: row["tokens"] for row in measured
    }
    # Sums of a whole text have another order: where inputs are rounded, a near tie may turn over.
    assert all(
        row["equal_in_one_pass"] == row["tokens"] or row["gap_steps"] < 64 for row in measured
    )
    shown = capsys.readouterr().out
    assert all(row["content_hash"][:12] in shown for row in measured)
