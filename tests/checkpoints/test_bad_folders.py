"""A folder that is damaged, incomplete or of another version: one line says what is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.hashing import content_hash
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.safetensors_io import write_tensors
from flexq_bench.checkpoints.stored import tensors_of
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
def folder(write) -> Path:
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


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def change_config(folder: Path, change) -> None:
    """Change config.json, and have it name the hash of what it says then."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    section = config["quantization_config"]
    change(config, section, section["flexq_bench"])
    path.write_text(json.dumps(config))


def with_tensor(folder: Path, name: str, change) -> None:
    """Change one tensor, and digests and hash with it: what a wrong writer would write."""
    path = next(shard for shard in shards(folder) if name in load_file(shard))
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    path.unlink()
    write_tensors(path, tensors)

    def rehash(config, section, extension):
        extension["content_hash"] = content_hash(config, tensors_of(folder))

    change_config(folder, rehash)


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.layers:
        checkpoint.layer(name)
    for name in checkpoint.tensor_names:
        checkpoint.tensor(name)


def complaint(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_folder_is_read(folder):
    assert is_checkpoint(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layer(UP).weight.rows == 96
    assert len(shards(folder)) > 1


def test_a_shard_that_is_cut_off(folder):
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert "cut off" in complaint(folder)


@pytest.mark.parametrize("size", [0, 4, 20])
def test_a_shard_that_is_cut_off_in_its_header(folder, size):
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:size])
    assert "cut off or damaged" in complaint(folder)


def test_a_header_that_nests_without_end(folder):
    header = b"[" * 100_000
    shards(folder)[0].write_bytes(struct.pack("<Q", len(header)) + header)
    assert "cut off or damaged" in complaint(folder)


def test_a_shard_that_is_missing(folder):
    shards(folder)[1].unlink()
    assert "is missing" in complaint(folder)


def test_a_shard_of_another_checkpoint(folder):
    path = shards(folder)[1]
    save_file({"other": torch.ones(1)}, path)
    assert "has other tensors" in complaint(folder)


def test_a_byte_that_is_damaged_is_found_when_its_tensor_is_read(folder):
    path = shards(folder)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    assert open_checkpoint(folder).layers  # headers alone are read
    assert "not those that were written" in complaint(folder)


def test_a_hash_that_is_wrong(folder):
    change_config(folder, lambda c, s, extension: extension.update(content_hash="0" * 64))
    assert "content hash" in complaint(folder)


def test_a_seed_that_was_changed(folder):
    change_config(folder, lambda c, s, extension: extension["scheme"].update(seed=9))
    assert "content hash" in complaint(folder)


def test_another_version_of_the_format(folder):
    change_config(folder, lambda c, s, extension: extension.update(version=2))
    assert "has version 2" in complaint(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
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
        (lambda c, s, e: c.update(hidden_size=64), "asks for"),
        (lambda c, s, e: c.update(num_hidden_layers=3), "asks for 3"),
        (lambda c, s, e: c.update(num_hidden_layers=10**12), "asks for 1000000000000"),
        (lambda c, s, e: c.update(num_attention_heads=None), "content hash"),
        (lambda c, s, e: c.update(num_attention_heads=0), "content hash"),
        (lambda c, s, e: e["layers"].update({"model.layers.0.x": e["layers"][UP]}), "lacks"),
    ],
)
def test_a_configuration_that_can_not_be(folder, change, said):
    change_config(folder, change)
    assert said in complaint(folder)


def nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    if tensor.dtype == torch.float8_e4m3fn:
        changed.view(torch.uint8)[0, 0] = 0xFF
    else:
        changed.view(-1)[0] = float("nan")
    return changed


@pytest.mark.parametrize(
    ("name", "change", "said"),
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
def test_numbers_that_can_not_be(folder, name, change, said):
    with_tensor(folder, name, change)
    assert said in complaint(folder)


def test_another_tokenizer(write, tmp_path, folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer" in complaint(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"quantization_config": 3}'])
def test_no_checkpoint(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError):
        open_checkpoint(tmp_path)


def test_no_folder(tmp_path):
    assert not is_checkpoint(tmp_path / "none")
    with pytest.raises(UsageError, match="no quantized checkpoint"):
        open_checkpoint(tmp_path / "none")
