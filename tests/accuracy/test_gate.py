"""`gate accuracy` on the model that the repository ships: what passes, what fails, and how."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "accuracy"))

from path_damage import DAMAGES

from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.cpu.bitplane import BitPlaneGemm

QUICK = """
version = 1
schemes = ["flexq-w6ax"]
max_tokens = 255

[[perplexity]]
text = "heldout"
percent = 2

[parity]
tolerance = 0.001
"""
LIMITS_ALONE = QUICK.partition("[parity]")[0]


@pytest.fixture
def gate(cli, tiny_llama, tmp_path):
    """gate("--scheme", "w6a6", policy="…"): the gate with tiny-llama's policy, or another one."""

    def run(*options, policy=None, data="heldout.txt"):
        path = tiny_llama / "policy.toml"
        if policy is not None:
            path = tmp_path / "mine.toml"
            path.write_text(policy)
        given = () if data is None else ("--data", str(tiny_llama / data))
        where = ("--model", str(tiny_llama), "--policy", str(path), "--device", "cpu")
        return cli("gate", "accuracy", *where, *given, "--no-diagnosis", *options)

    return run


def flip_one_group(operand):
    """The codes with a scale of the other sign in one group; dense values as they are."""
    if operand.scales is None:
        return operand
    scales = operand.scales.clone()
    scales[0, 0] = -scales[0, 0]
    return replace(operand, scales=scales)


@pytest.mark.parametrize("policy", [QUICK, pytest.param(None, marks=pytest.mark.slow)])
def test_flexq_passes_with_registry_kernels(gate, monkeypatch, policy):
    used = set()
    gemm = BitPlaneGemm.gemm

    def noting(self, x, w, out, **options):
        used.add(self.spec.label)
        gemm(self, x, w, out, **options)

    monkeypatch.setattr(BitPlaneGemm, "gemm", noting)
    ran = gate("--scheme", "flexq-w6ax", policy=policy)
    assert ran.code == ExitCode.PASS, ran.out + ran.error
    assert re.search(r"passed: .*tiny-llama against fp16", ran.out)
    assert used == {"flexq", "flexq[w6a8]"}


def test_flipped_scale_in_a_kernel_fails(gate, monkeypatch):
    pack = BitPlaneGemm.pack_weight
    monkeypatch.setattr(
        BitPlaneGemm, "pack_weight", lambda self, weight: pack(self, flip_one_group(weight))
    )
    ran = gate("--json", "-", policy=QUICK)
    found = json.loads(ran.out)
    assert ran.code == ExitCode.REGRESSION
    outcomes = {check["check"]: check["outcome"] for check in found["checks"]}
    assert outcomes == {"perplexity of heldout": "pass", "parity of kernels": "fail"}


def test_gate_without_text_is_missing(gate):
    ran = gate(data=None, policy=QUICK)
    assert ran.code == ExitCode.MISSING
    assert "heldout: no text: give --data heldout=FILE" in ran.error


def test_scheme_as_its_own_base_is_refused(gate):
    ran = gate("--scheme", "w6a6", "--base", "w6a6")
    assert ran.code == ExitCode.USAGE
    assert "w6a6 can't be judged against itself" in ran.error


def test_text_without_limit_is_refused(gate):
    ran = gate(data="calibration.txt")
    assert ran.code == ExitCode.USAGE
    assert "no limit on a text called calibration: its texts are heldout" in ran.error


def test_formats_without_a_kernel_are_not_judged(gate):
    ran = gate("--scheme", "w6a16[group=32]", "--json", "-", policy=QUICK)
    checks = {c["check"]: c for c in json.loads(ran.out)["checks"]}
    assert ran.code == ExitCode.MISSING
    assert checks["parity of kernels"]["outcome"] == "not judged"
    assert "no kernel reads int6/32 weights" in checks["parity of kernels"]["reason"]


@pytest.mark.slow
def test_other_kernels_for_the_formats_can_be_named(gate):
    named = 'kernels = ["flexq-w6a6"]\ntolerance'
    ran = gate("--json", "-", policy=QUICK.replace("tolerance", named))
    assert ran.code == ExitCode.PASS, ran.out + ran.error
    ran = gate(policy=QUICK.replace("tolerance", named.replace("w6a6", "w6a9")))
    assert ran.code == ExitCode.MISSING
    assert "no kernel 'flexq-w6a9'" in " ".join(ran.out.split())


def test_four_bits_fail_in_all_reports(gate, tmp_path):
    files = {name: tmp_path / f"report.{name}" for name in ("markdown", "junit", "json")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    divergence = '[kl]\ntext = "heldout"\nmean = 0.006\np99 = 0.05\n'
    ran = gate("--scheme", "w4a4", "--diagnosis", *options, policy=QUICK + divergence)
    assert ran.code == ExitCode.REGRESSION
    document = json.loads(files["json"].read_text())
    assert document["exit_code"] == 1
    assert document["headline"] in ran.out
    assert len(document["model_hash"]) == 64
    assert document["headline"] in files["markdown"].read_text()
    assert "| **fail** | `w4a4` | perplexity of heldout | +" in files["markdown"].read_text()
    suite = ElementTree.fromstring(files["junit"].read_text())
    counts = {name: int(count) for name, count in suite.attrib.items()}
    assert counts["tests"] == len(document["checks"])
    assert counts["failures"] >= 3
    skipped = [check for check in document["checks"] if check["outcome"] == "not judged"]
    assert (counts["errors"], counts["skipped"]) == (0, len(skipped))


SERVED = """
[serving_path]
batches = [1, 3]
tokens = 64
steps = 6
prompts = 4
new = 8
"""


@pytest.mark.parametrize("damage", ["nothing", "kernels at zero, 3 to 3 tokens", "norms x 1.01"])
def test_damage_that_only_serving_shows_fails(gate, damage):
    options = ("--scheme", "w8a16", "--through", "kernels", "--json", "-")
    with DAMAGES[damage](torch.device("cpu"), frozenset(["w8a16"])):
        ran = gate(*options, policy=LIMITS_ALONE + SERVED)
    checks = {c["check"]: c for c in json.loads(ran.out)["checks"]}
    healthy = damage == "nothing"
    assert ran.code == (ExitCode.PASS if healthy else ExitCode.REGRESSION)
    assert checks["perplexity of heldout"]["outcome"] == "pass"
    assert checks["serving path"]["outcome"] == ("pass" if healthy else "fail")
    assert checks["serving path"]["coverage"].endswith("batch 1, 3, up to position 63")


def test_serving_path_without_kernels_is_not_judged_unless_allowed(gate):
    policy = LIMITS_ALONE + SERVED
    assert gate("--scheme", "w8a16", policy=policy).code == ExitCode.MISSING
    allowed = policy.replace("max_tokens", 'allow_not_judged = ["serving path"]\nmax_tokens')
    ran = gate("--scheme", "w8a16", policy=allowed)
    assert ran.code == ExitCode.PASS
    assert "passed: 1 not judged (allowed), 1 pass" in ran.out


def test_decision_is_stored(gate, tmp_path):
    two_segments = QUICK.replace("= 255", "= 510")  # one has no interval
    assert gate("--scheme", "w4a4", policy=two_segments).code == ExitCode.REGRESSION
    with open_database(str(tmp_path / "flexq.sqlite")) as database, database.session() as session:
        (row,) = queries.gate_history(session, "tiny-llama", limit=9)
    assert (row.scheme, row.base, row.policy) == ("w4a4", "fp16", "mine")
    assert (row.verdict, row.exit_code) == ("fail", 1)
    assert [limit.check for limit in row.limits] == ["perplexity of heldout", "parity of kernels"]
    assert row.limits[0].low < row.limits[0].change < row.limits[0].high


@pytest.mark.slow
@pytest.mark.timeout(900)  # three processes, and other programs use this CPU too
def test_benchmark_shows_all_three_verdicts(tiny_llama, tmp_path):
    root = tiny_llama.parents[2]
    script = [sys.executable, str(root / "benchmarks" / "accuracy" / "gate_verdicts.py")]
    script += ["--model", str(tiny_llama), "--data", f"heldout={tiny_llama / 'heldout.txt'}"]
    script += ["--policy", str(tiny_llama / "policy.toml"), "--device", "cpu"]
    environment = os.environ | {
        "FLEXQ_BENCH_DB": str(tmp_path / "flexq.sqlite"),
        "PYTHONPATH": str(root),
    }
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.findall(r"exit code (\d), \d+ s", ran.stdout) == ["0", "1", "1"]


@pytest.mark.parametrize("through", ["reference", "kernels"])
def test_gate_stores_the_hash_of_its_checkpoint(gate, checkpoint, tmp_path, through):
    files = {name: tmp_path / f"report.{name}" for name in ("markdown", "junit", "json")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    ran = gate(
        *("--checkpoint", str(checkpoint), "--through", through, *options), policy=LIMITS_ALONE
    )
    assert ran.code == ExitCode.PASS, ran.out + ran.error
    digest = open_checkpoint(checkpoint).content_hash
    document = json.loads(files["json"].read_text())
    assert document["content_hashes"] == {"flexq-w6ax": digest}
    assert document["through"] == through
    assert digest in files["markdown"].read_text()
    properties = ElementTree.fromstring(files["junit"].read_text()).iter("property")
    assert digest in {item.attrib["value"] for item in properties}
    with open_database(str(tmp_path / "flexq.sqlite")) as database, database.session() as session:
        (row,) = queries.gate_history(session, "tiny-llama", limit=9)
    assert (row.content_hash, row.through, row.verdict) == (digest, through, "pass")


def test_checkpoint_with_damaged_bytes_fails_and_is_stored(gate, checkpoint, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    shard = sorted(damaged.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-100:] = bytes(255 - byte for byte in content[-100:])
    shard.write_bytes(content)
    ran = gate("--checkpoint", str(damaged), policy=LIMITS_ALONE)
    assert ran.code == ExitCode.REGRESSION
    with open_database(str(tmp_path / "flexq.sqlite")) as database, database.session() as session:
        (row,) = queries.gate_history(session, "tiny-llama", limit=9)
    outcomes = {limit.check: limit.outcome for limit in row.limits}
    assert outcomes == {"model": "fail", "perplexity of heldout": "not judged"}


@pytest.mark.parametrize("through", ["reference", pytest.param("kernels", marks=pytest.mark.slow)])
def test_damaged_layer_with_valid_hash_fails(gate, checkpoint, damaged, through):
    folder = damaged(checkpoint, lambda w: replace(w, values=w.values.flip(1).contiguous()))
    judged = ("--checkpoint", str(folder), "--through", through)
    ran = gate(*judged, policy=LIMITS_ALONE)
    assert ran.code == ExitCode.REGRESSION, ran.out + ran.error
    assert "look first at" not in ran.out + ran.error


@pytest.mark.slow
def test_wrong_kernel_scale_fails_through_kernels_only(gate, checkpoint, monkeypatch):
    pack = BitPlaneGemm.pack_weight

    def spoil(self, weight):
        packed = pack(self, weight)
        scales = packed.buffers["scales"].clone()
        scales[:, 0] *= 8
        return PackedOperand(packed.buffers | {"scales": scales}, packed.rows, packed.k)

    monkeypatch.setattr(BitPlaneGemm, "pack_weight", spoil)
    judged = ("--checkpoint", str(checkpoint), "--through")
    assert gate(*judged, "reference", policy=LIMITS_ALONE).code == ExitCode.PASS
    assert gate(*judged, "kernels", policy=LIMITS_ALONE).code == ExitCode.REGRESSION


def test_gate_of_a_checkpoint_needs_its_original(cli, checkpoint):
    ran = cli("gate", "accuracy", "--model", str(checkpoint), "--device", "cpu")
    assert ran.code == ExitCode.USAGE
    assert "give it with --checkpoint" in ran.error
