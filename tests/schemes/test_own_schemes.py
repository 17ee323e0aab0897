"""Schemes of a user's own, from a file and from an entry point, through the verbs."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.exit_codes import ExitCode
from flexq_bench.schemes import QuantizeError, named_schemes, own_scheme, resolve
from flexq_bench.schemes.own_schemes import FROM_FILES, GROUP
from flexq_bench.schemes.registry import add_schemes_from

SOURCE = """
import torch
from flexq_bench.schemes import own_scheme

@own_scheme("mine-w6a6", w_bits=6, group=128, a_bits=6, source="A page of ours")
def mine(weight, statistics):
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128))
    grouped = padded.unflatten(1, (-1, 128))
    scales = (grouped.abs().amax(2) / 31).clamp(min=1e-7).to(torch.float16)
    codes = (grouped / scales.float()[:, :, None]).round().clamp(-32, 31)
    return codes.flatten(1)[:, : weight.shape[1]].to(torch.int8), scales

@own_scheme("seeing-w8", w_bits=8, calibrated=True)
def seeing(weight, statistics):
    assert statistics.mean_square.shape == (weight.shape[1],) and statistics.tokens > 0
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales.half().float()).round().clamp(-128, 127).int(), scales
"""
ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-llama"


@pytest.fixture(autouse=True)
def _no_files(monkeypatch):
    monkeypatch.setenv(FROM_FILES, "")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_file_adds_schemes_with_formats_and_caches(file):
    assert add_schemes_from(str(file)) == ("mine-w6a6", "seeing-w8")
    scheme = resolve("mine-w6a6+kv8")
    assert (scheme.kv_bits, scheme.source, scheme.version) == (8, "A page of ours", 1)
    assert scheme.layer_formats("q_proj", True).name == "int6/128 x int6/128"
    shown = {named.scheme.name: named for named in named_schemes()}
    assert shown["mine-w6a6"].gated[0].kernel == shown["w6a6"].gated[0].kernel != ""


def test_own_rounding_to_nearest_has_equal_perplexity(cli, file):
    data = ("--data", str(TINY / "heldout.txt"), "--max-tokens", "255", "--device", "cpu")
    ran = cli(
        *("accuracy", "--model", str(TINY), "--schemes-from", str(file), *data),
        *("--schemes", "mine-w6a6,w6a6", "--json", "-"),
    )
    assert ran.code == ExitCode.PASS, ran.error
    records = [json.loads(line) for line in ran.out.splitlines()]
    values = {r["scheme"]: r["value"] for r in records if r["metric"] == "perplexity"}
    assert values["mine-w6a6"] == pytest.approx(values["w6a6"], rel=2e-3)


def test_calibrated_own_scheme_gets_statistics_and_is_stored(cli, file, tmp_path):
    out = tmp_path / "checkpoint"
    ran = cli(
        *("quantize", str(TINY), "--schemes-from", str(file), "--scheme", "seeing-w8"),
        *("--calibration", str(TINY / "calibration.txt"), "--calibration-segments", "2"),
        *("--out", str(out), "--device", "cpu"),
    )
    assert ran.code == ExitCode.PASS, ran.error
    assert open_checkpoint(out).scheme.name == "seeing-w8"


def test_sensitivity_accepts_own_scheme(cli, file):
    ran = cli(
        *("sensitivity", "--model", str(TINY), "--schemes-from", str(file)),
        *("--data", str(TINY / "heldout.txt"), "--bits", "mine-w6a6", "--max-tokens", "255"),
        *("--device", "cpu", "--json"),
    )
    assert ran.code == ExitCode.PASS, ran.error
    assert "mine-w6a6" in ran.out


def test_accuracy_gate_accepts_own_scheme(cli, file, tmp_path):
    policy = tmp_path / "mine.toml"
    policy.write_text(
        'version = 1\nschemes = ["mine-w6a6"]\nmax_tokens = 255\n'
        '[[perplexity]]\ntext = "heldout"\npercent = 5\n'
    )
    ran = cli(
        *("gate", "accuracy", "--model", str(TINY), "--schemes-from", str(file)),
        *("--policy", str(policy), "--data", str(TINY / "heldout.txt"), "--device", "cpu"),
    )
    assert ran.code == ExitCode.PASS, ran.out + ran.error


def test_an_entry_point_adds_its_scheme(monkeypatch):
    @own_scheme("theirs-w4", w_bits=4)
    def theirs(weight, statistics):
        return torch.zeros(weight.shape, dtype=torch.int8), torch.ones(len(weight), 1)

    class Point:
        name, value = "theirs", "their_package:theirs"

        def load(self):
            return theirs

    found = metadata.entry_points
    monkeypatch.setattr(
        metadata,
        "entry_points",
        lambda **wanted: [Point()] if wanted == {"group": GROUP} else found(**wanted),
    )
    assert resolve("theirs-w4").layer_formats("q_proj", True).weight.bits == 4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("weight.round(), weight[:, :1]", "codes must be integers"),
        ("weight.round().int() + 99, weight[:, :1]", "codes of 6 bits lie within -32 … 31"),
        ("weight.int() * 0, weight[:, :1] * 1e9", "scales must be finite in FP16"),
        ("weight.int() * 0, weight[:, :2]", "scales of a"),
        ("weight.int() * 0", "q_proj"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("sys.exit(0)", "SystemExit: 0"),  # which a gate must not end with
    ],
)
def test_wrong_result_of_a_function_is_one_line(returned, message):
    @own_scheme("bad-w6", w_bits=6)
    def bad(weight, statistics):
        return eval(returned, {"sys": sys}, {"weight": weight})

    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)) * 9
    with pytest.raises(QuantizeError) as raised:
        bad.operand(weight, None, "layers.0.q_proj")
    assert message in str(raised.value)
    assert str(raised.value).startswith("bad-w6: layers.0.q_proj: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "has no scheme"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        (SOURCE.replace("mine-w6a6", "w6a6"), "called w6a6, as one of ours"),
        (SOURCE.replace("w_bits=6", "w_bits=9"), "weights have 2 to 8 bits"),
    ],
)
def test_unusable_file_is_refused(tmp_path, source, message):
    path = tmp_path / "other.py"
    path.write_text(source)
    with pytest.raises(QuantizeError, match=message):
        add_schemes_from(str(path))
    with pytest.raises(QuantizeError, match="no file"):
        add_schemes_from(str(tmp_path / "nothing.py"))
