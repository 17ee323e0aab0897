"""A folder that is damaged, incomplete or of another version: one line says what is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.hashing import content_hash
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.safetensors_io import write_tensors
from flexq_bench.errors import UsageError
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.activations import StaticActivation
from flexq_bench.schemes.quantized_layer import QuantizedLayer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "head_dim": None,
    "num_hidden_layers": 2,
}
CALIBRATED = {
    "tokens": "0" * 64,
    "segments": 8,
    "length": 256,
    "device": "cpu",
    "dtype": "float32",
}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(write):
    """Two blocks in two shards and more: codes with a tail, dual ones, a static activation."""
    matrix = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    static = StaticActivation(NumberFormat(8), 0.5)
    layers = {
        UP: QuantizedLayer(quantize(matrix, NumberFormat(6, 128)), static),
        "model.layers.1.mlp.up_proj": QuantizedLayer(
            quantize(matrix, NumberFormat(4, 128, "mixed"))
        ),
        "model.layers.1.mlp.gate_proj": QuantizedLayer(
            quantize(matrix, NumberFormat(8, None, "float"))
        ),
    }
    return write(layers, config=CONFIG, shard_bytes=12000)


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def change_config(folder, change):
    """Change config.json, without a new content hash."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    section = config["quantization_config"]
    change(config, section, section["flexq_bench"])
    path.write_text(json.dumps(config))


def with_tensor(folder, name, change):
    """Change one tensor, and digests and hash with it: what a wrong writer would write."""
    path = next(shard for shard in shards(folder) if name in load_file(shard))
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    path.unlink()
    write_tensors(path, tensors)

    def rehash(config, section, extension):
        extension["content_hash"] = content_hash(config, FolderTensors(folder).infos)

    change_config(folder, rehash)


def read_all(folder):
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.layers:
        checkpoint.layer(name)
    for name in checkpoint.tensor_names:
        checkpoint.tensor(name)


def complaint(folder):
    with pytest.raises(UsageError) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_intact_folder_is_read(folder):
    assert is_checkpoint(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layer(UP).weight.rows == 96
    assert len(shards(folder)) > 1


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


def nest(path):
    header = b"[" * 100_000
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: cut(path, -1), "cut off"),
        (lambda path: cut(path, 0), "cut off or damaged"),
        (lambda path: cut(path, 4), "cut off or damaged"),
        (lambda path: cut(path, 20), "cut off or damaged"),
        (nest, "cut off or damaged"),
        (Path.unlink, "lacks model-00001-of-"),
        (lambda path: save_file({"other": torch.ones(1)}, path), "says that model-00001-of-"),
    ],
)
def test_damaged_or_missing_shard_is_refused(folder, damage, message):
    damage(shards(folder)[0])
    assert message in complaint(folder)


def test_damaged_byte_is_found_when_its_tensor_is_read(folder):
    path = shards(folder)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    assert open_checkpoint(folder).layers  # only headers are read
    assert "not those that were written" in complaint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, s, e: e.update(content_hash="0" * 64), "content hash"),
        (lambda c, s, e: e["scheme"].update(seed=9), "content hash"),
        (lambda c, s, e: e.update(version=2), "has version 2"),
        (lambda c, s, e: s.update(surprise=1), "surprise"),
        (lambda c, s, e: e.update(surprise=1), "surprise"),
        (lambda c, s, e: e["layers"][UP].update(weight="int9/128"), "2 to 8 bits"),
        (lambda c, s, e: e["layers"][UP].update(weight="float6"), "float6"),
        (lambda c, s, e: e["layers"][UP].update(shape=[0, 128]), "shape"),
        (lambda c, s, e: e["layers"][UP]["activation"].update(scale=-1), "scale"),
        (lambda c, s, e: e["layers"][UP]["activation"].pop("scale"), "has a scale"),
        (lambda c, s, e: e.update(kv_bits=5), "kv_bits"),
        (lambda c, s, e: e.pop("scheme"), "scheme"),
        (lambda c, s, e: e.update(calibration=CALIBRATED | {"tokens": "ab"}), "calibration.tokens"),
        (lambda c, s, e: e.update(calibration=CALIBRATED | {"segments": "8"}), "segments"),
        (lambda c, s, e: e.update(calibration=CALIBRATED | {"segments": 0}), "segments"),
        (lambda c, s, e: e.update(calibration=CALIBRATED | {"length": 1.5}), "length"),
        (lambda c, s, e: e.update(calibration=CALIBRATED | {"dtype": "int8"}), "dtype"),
        (lambda c, s, e: e.update(calibration=CALIBRATED | {"device": 3}), "device"),
        (lambda c, s, e: e.update(calibration={"segments": 8}), "calibration"),
        (lambda c, s, e: e.update(calibration="c4"), "calibration"),
        (lambda c, s, e: s.update(format="pack-quantized"), "its config_groups contradict"),
        (lambda c, s, e: e["layers"][UP].update(shape=[96, 256]), "its config.json says"),
        (lambda c, s, e: c.update(hidden_size=64), "content hash"),
        (lambda c, s, e: c.update(num_hidden_layers=3), "content hash"),
        (lambda c, s, e: c.update(num_hidden_layers=10**12), "content hash"),
        (lambda c, s, e: c.update(num_attention_heads=None), "content hash"),
        (lambda c, s, e: c.update(num_attention_heads=0), "content hash"),
        (lambda c, s, e: e["layers"].update({"model.layers.0.x": e["layers"][UP]}), "lacks"),
    ],
)
def test_invalid_configuration_is_refused(folder, change, message):
    change_config(folder, change)
    assert message in complaint(folder)


def nan(tensor):
    changed = tensor.clone()
    if tensor.dtype == torch.float8_e4m3fn:
        changed.view(torch.uint8)[0, 0] = 0xFF
    else:
        changed.view(-1)[0] = float("nan")
    return changed


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{UP}.weight_scale", nan, "NaN"),
        ("model.layers.1.mlp.gate_proj.weight", nan, "NaN"),
        ("model.norm.weight", nan, "NaN"),
        ("model.layers.1.mlp.up_proj.weight_order", torch.zeros_like, "no permutation"),
        (f"{UP}.weight_shape", lambda shape: shape + 1, "configuration says"),
        (f"{UP}.input_scale", lambda scale: scale * 2, "configuration says"),
        (f"{UP}.weight_scale", lambda scale: scale.float(), "float16"),
    ],
)
def test_invalid_tensor_is_refused(folder, name, change, message):
    with_tensor(folder, name, change)
    assert message in complaint(folder)


def test_changed_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer" in complaint(folder)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"quantization_config": 3}'])
def test_folder_without_checkpoint_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    else:
        assert not is_checkpoint(tmp_path)
    with pytest.raises(UsageError):
        open_checkpoint(tmp_path)
