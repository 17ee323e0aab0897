"""External folders whose files contradict each other, or themselves: one line, exit code 2."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.cli.app import main
from flexq_bench.exit_codes import ExitCode

SECTION = {
    "quant_method": "compressed-tensors",
    "format": "naive-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(a_folder):
    """tiny-llama in INT8, in two shards."""

    def quantized(_, weight):
        scale = weight.float().abs().amax(1, keepdim=True).div(127).half()
        return {"weight": (weight / scale).round().char(), "weight_scale": scale}

    path = a_folder(SECTION, quantized)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for shard, part in zip(SHARDS, (names[:20], names[20:]), strict=True):
        save_file({name: tensors[name] for name in part}, path / shard)
        where |= dict.fromkeys(part, shard)
    (path / INDEX).write_text(json.dumps({"weight_map": where}))
    return path


def complaint(folder, capsys, tiny_llama):
    capsys.readouterr()
    data = ("--data", str(tiny_llama / "heldout.txt"), "--max-tokens", "9", "--context", "9")
    db = ("--db", str(folder.parent / "results.sqlite"))
    code = main(("accuracy", "--model", str(folder), *data, *db, "--device", "cpu"))
    error = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert error.count("\n") == 1
    return error


def with_index(folder, change):
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


NORM = "model.norm.weight"  # in the second shard


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda where: where.update({NORM: SHARDS[0]}), f"says that {SHARDS[0]} has {NORM}"),
        (lambda where: where.update(ghost=SHARDS[0]), f"says that {SHARDS[0]} has ghost"),
        (lambda where: where.update({NORM: "x" * 5000}), "lacks xxx"),
    ],
)
def test_index_naming_another_file_is_refused(folder, capsys, tiny_llama, change, message):
    with_index(folder, change)
    assert message in complaint(folder, capsys, tiny_llama)


def test_duplicate_field_of_the_configuration_is_refused(folder, capsys, tiny_llama):
    path = folder / "config.json"
    path.write_text('{"hidden_size": 64,' + path.read_text().lstrip("{ \n"))
    assert "'hidden_size' twice" in complaint(folder, capsys, tiny_llama)


def test_duplicate_tensor_of_a_header_is_refused(folder, capsys, tiny_llama):
    path = folder / SHARDS[1]
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    entry = json.dumps(header[NORM])
    text = f'{{"{NORM}": {entry}, {json.dumps(header)[1:]}'.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    assert f"'{NORM}' twice" in complaint(folder, capsys, tiny_llama)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("rms_norm_eps", float("nan"), "NaN"), ("num_attention_heads", None, "num_attention_heads")],
)
def test_configuration_without_numbers_is_refused(
    folder, capsys, tiny_llama, field, value, message
):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert message in complaint(folder, capsys, tiny_llama)


GPTQ_4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
EXCLUDING = [
    (GPTQ_4 | {"dynamic": {r"-:.*down_proj": {}}}, "dynamic -:"),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
        | {"modules_to_not_convert": ["down_proj"]},
        "modules_to_not_convert",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True}
        | {"llm_int8_skip_modules": ["layers.1.mlp.down_proj"]},
        "llm_int8_skip_modules",
    ),
]


def packed(section, weight):
    """Codes of 4 bits, or of 8, in the shapes that a layout has; their values don't matter."""
    n, k = weight.shape
    if section["quant_method"] == "bitsandbytes":
        return {"weight": torch.ones(n, k, dtype=torch.int8), "SCB": torch.arange(n) + 1.0}
    qweight = (k // 8, n) if section["quant_method"] == "gptq" else (k, n // 8)
    middle = 0x77777777 if section["quant_method"] == "gptq" else -0x77777778
    return {
        "qweight": torch.arange(k * n // 8, dtype=torch.int32).view(qweight),
        "qzeros": torch.full((-(-k // 128), n // 8), middle, dtype=torch.int32),
        "scales": torch.full((-(-k // 128), n), 0.01, dtype=torch.float16),
    }


@pytest.mark.parametrize(("section", "key"), EXCLUDING)
def test_excluded_layer_with_codes_is_refused(a_folder, capsys, tiny_llama, section, key):
    path = a_folder(section, lambda _, weight: packed(section, weight))
    assert f"not quantized ({key}" in complaint(path, capsys, tiny_llama)


@pytest.mark.parametrize("section", [section for section, _ in EXCLUDING[:2]])
def test_zeroed_codes_are_refused(a_folder, capsys, tiny_llama, section):
    def zeroed(_, weight):
        tensors = packed(section, weight)
        return tensors | {"qweight": torch.zeros_like(tensors["qweight"])}

    plain = {k: v for k, v in section.items() if k not in ("dynamic", "modules_to_not_convert")}
    path = a_folder(plain, zeroed)
    assert "all codes of" in complaint(path, capsys, tiny_llama)
