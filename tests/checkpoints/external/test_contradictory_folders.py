"""External folders whose files contradict each other, or themselves: one line, exit code 2."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.reader import open_checkpoint
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
AWQ_4 = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
MLX_4 = {"quant_method": "metal", "bits": 4, "group_size": 64}
EXCLUDING = [
    (MLX_4 | {"modules_to_not_convert": [r"model.layers.*.mlp"]}, "modules_to_not_convert"),
    (GPTQ_4 | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "modules_in_block"),
    (GPTQ_4 | {"modules_to_not_convert": ["*down_proj"]}, "modules_to_not_convert"),
    (GPTQ_4 | {"dynamic": {r"-:.*down_proj": {}}}, "dynamic -:"),
    (AWQ_4 | {"modules_to_not_convert": ["down_proj"]}, "modules_to_not_convert"),
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
    if section["quant_method"] == "metal":
        scales = torch.rand(n, k // 64) + 0.5
        codes = torch.arange(n * k // 8, dtype=torch.int32).view(n, k // 8).view(torch.uint32)
        return {"weight": codes, "scales": scales, "qbiases": -scales}
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


ONE_SCALE = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize("section", [GPTQ_4, AWQ_4, ONE_SCALE])
def test_zeroed_codes_are_refused(a_folder, capsys, tiny_llama, section):
    def zeroed(_, weight):
        if section is ONE_SCALE:
            zeros = torch.zeros_like(weight).to(torch.float8_e4m3fn)
            return {"weight": zeros, "weight_scale": torch.tensor(0.01)}
        tensors = packed(section, weight)
        return tensors | {"qweight": torch.zeros_like(tensors["qweight"])}

    path = a_folder(section, zeroed)
    assert "all codes of" in complaint(path, capsys, tiny_llama)


@pytest.mark.parametrize(
    ("section", "zeros"),
    [
        (SECTION, {"weight_scale": torch.full((128, 1), 2.0**-7)}),
        (ONE_SCALE, {"weight_scale": torch.tensor(2.0**-23)}),
        (GPTQ_4, {}),
    ],
)
def test_layer_of_zeros_opens_with_scales_of_zeros(a_folder, section, zeros):
    def of_zeros(name, weight):
        if section is GPTQ_4:
            tensors = packed(section, weight)
            middle = torch.full_like(tensors["qweight"], -0x77777778)
            scales = torch.full_like(tensors["scales"], 2 / 15)
            return tensors | ({"qweight": middle, "scales": scales} if "o_proj" in name else {})
        dtype = torch.int8 if section is SECTION else torch.float8_e4m3fn
        if "o_proj" in name:
            return {"weight": torch.zeros_like(weight).to(dtype), **zeros}
        scale = torch.full((len(weight), 1), 0.01) if section is SECTION else torch.tensor(0.01)
        return {"weight": (weight / 0.01).to(dtype), "weight_scale": scale}

    checkpoint = open_checkpoint(a_folder(section, of_zeros))
    layer = checkpoint.layer("model.layers.0.self_attn.o_proj")
    assert not layer.weight.dequantize(torch.float32).any()


@pytest.mark.parametrize("section", [GPTQ_4, MLX_4])
def test_layer_without_codes_that_is_not_excluded_is_refused(a_folder, capsys, tiny_llama, section):
    dense = "model.layers.1.mlp.down_proj"
    path = a_folder(section, lambda name, w: None if name == dense else packed(section, w))
    assert f"{dense} has no codes" in complaint(path, capsys, tiny_llama)


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        *(("eetq", "original"), ("higgs", "original"), ("aqlm", "original"), ("spqr", "original")),
        *(
            ("vptq", "original"),
            ("fp_quant", "original"),
            ("quark", "export"),
            ("gemma", "original"),
        ),
        *(("nvfp4", "original"), ("unheard_of", "read here are")),
    ],
)
def test_layout_that_is_not_read_is_refused_with_advice(tmp_path, method, advice):
    section = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))

    with pytest.raises(CheckpointError, match=advice) as refusal:
        open_checkpoint(tmp_path)

    assert f"quantized by {method}: " in str(refusal.value)
    assert "\n" not in str(refusal.value)
