"""`quantize`: its output and its usage errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flexq_bench.checkpoints.reader import open_checkpoint

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
CALIBRATION = TINY_LLAMA / "calibration.txt"


def test_checkpoint_is_written_and_described(cli, tmp_path):
    out = tmp_path / "out"

    ran = cli("quantize", str(TINY_LLAMA), "--scheme", "w6a6", "--out", str(out), "--device", "cpu")

    checkpoint = open_checkpoint(out)
    assert ran.code == 0
    assert f"content hash: {checkpoint.content_hash}" in ran.out
    assert "bits a weight: 6.131" in ran.out  # 6 + 16/128, and two numbers of 64 bits a layer
    assert "peak memory: " in ran.out
    assert (out / "tokenizer.json").is_file()
    assert checkpoint.scheme.name == "w6a6"

    again = ("quantize", str(TINY_LLAMA), "--scheme", "w6a6", "--out", str(out))
    assert "--overwrite" in cli(*again).error
    facts = json.loads(cli(*again, "--overwrite", "--seed", "1", "--json").out)
    assert facts["content_hash"] == open_checkpoint(out).content_hash != checkpoint.content_hash
    assert facts["bits_per_weight"] == pytest.approx(6.131, abs=1e-3)


def test_calibration_and_cache_bits_are_stored(cli, tmp_path):
    out = tmp_path / "out"

    ran = cli(
        *("quantize", str(TINY_LLAMA), "--scheme", "smoothquant-w8a8", "--out", str(out)),
        *("--calibration", str(CALIBRATION), "--calibration-segments", "2"),
        *("--calibration-length", "32", "--kv-bits", "8", "--device", "cpu"),
    )

    assert ran.code == 0, ran.err
    checkpoint = open_checkpoint(out)
    assert checkpoint.kv_bits == 8
    learned = checkpoint.calibration
    assert (learned.segments, learned.length) == (2, 32)
    assert (learned.device, len(learned.tokens)) == ("cpu", 64)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((str(TINY_LLAMA), "--scheme", "gptq-w4a16"), "calibration data are needed"),
        (("llama-7b", "--scheme", "gptq-w4a16"), "random weights"),
        ((str(TINY_LLAMA), "--scheme", "w6a7b"), "w6a7b"),
        ((str(TINY_LLAMA), "--scheme", "w6a6", "--kv-bits", "5"), "16, 8 or 4"),
        ((str(TINY_LLAMA), "--scheme", "w6a6", "--dtype", "float8"), "float8"),
        ((str(TINY_LLAMA), "--scheme", "fp16"), "quantizes nothing"),
        (("nothing-there", "--scheme", "w6a6"), "nothing-there"),
        (
            (str(TINY_LLAMA), "--scheme", "awq-w4a16", "--calibration", str(CALIBRATION)),
            "128 segments",
        ),
    ],
)
def test_invalid_quantize_requests_leave_no_files(cli, tmp_path, arguments, says):
    ran = cli("quantize", *arguments, "--out", str(tmp_path / "here" / "out"))

    assert ran.code == 2
    assert says in ran.error
    assert not (tmp_path / "here" / "out").exists()


def test_invalid_configuration_is_not_reported_as_damaged_tokenizer(cli, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3}))

    ran = cli("quantize", str(model), "--scheme", "w4a16", "--out", str(tmp_path / "out"))

    assert ran.code == 2
    assert ran.error.startswith("flexq-bench: can't load model: ")
    assert "number of attention heads (3)" in ran.error


@pytest.mark.parametrize("scheme", ["w4a16", "gptq-w4a16"])
def test_damaged_tokenizer_is_usage_error_and_nothing_is_written(cli, tmp_path, scheme):
    model = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, model)
    whole = (model / "tokenizer.json").read_bytes()
    (model / "tokenizer.json").write_bytes(whole[: len(whole) // 2])

    text = ("--calibration", str(CALIBRATION)) if scheme.startswith("gptq") else ()
    ran = cli("quantize", str(model), "--scheme", scheme, *text, "--out", str(tmp_path / "out"))

    assert ran.code == 2
    assert f"{model} has no tokenizer that transformers reads" in ran.error
    assert len(ran.error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "flexq.sqlite"] == ["model"]
