"""One hash, one content."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.checkpoints.config import StoredCalibration, StoredScheme
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.quantized_layer import QuantizedLayer

SCHEME = StoredScheme(name="w6a6", version=1, seed=3)


def layers(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(16, 128, generator=generator) * scale for _ in range(2)]
    return {
        f"model.layers.{index}.x": QuantizedLayer(quantize(matrix, NumberFormat(6, 128)))
        for index, matrix in enumerate(matrices)
    }


def hash_of(folder):
    return open_checkpoint(folder).content_hash


def test_hash_ignores_shards_paths_and_library_versions(write):
    described = {"model_type": "llama", "transformers_version": "4.9", "_name_or_path": "a"}
    again = {"_name_or_path": "b", "model_type": "llama", "torch_dtype": "float16"}

    whole = write(layers(), at="whole", config=described)
    shards = write(layers(), at="elsewhere/shards", config=again, shard_bytes=1)

    assert len(list(shards.glob("*.safetensors"))) > 1
    assert hash_of(whole) == hash_of(shards)


def test_hash_is_equal_for_shards_of_another_program(write):
    folder = write(layers())
    wanted = hash_of(folder)
    tensors = load_file(folder / "model.safetensors")

    save_file(tensors, folder / "model.safetensors")  # without digests

    assert hash_of(folder) == wanted
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="its content hash is not the one"):
        open_checkpoint(folder)


def test_hash_ignores_the_calibration_record(write):
    """So checkpoints of versions that did not store it have the same hash."""
    learned = StoredCalibration(
        tokens="0" * 64, segments=8, length=256, device="cpu", dtype="float32"
    )
    with_it = write(layers(), at="with", calibration=learned)
    assert open_checkpoint(with_it).calibration == learned
    assert open_checkpoint(write(layers(), at="without")).calibration is None
    assert hash_of(with_it) == hash_of(with_it.with_name("without"))


def test_hash_covers_all_that_affects_results(write, tmp_path):
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text('{"a": 1}')
    base = layers()
    rounded = {
        name: replace(layer, activation=DynamicActivation(NumberFormat(8)))
        for name, layer in base.items()
    }
    folders = (
        write(base, at="base"),
        write(base, at="seed", scheme=SCHEME.model_copy(update={"seed": 4})),
        write(base, at="scheme", scheme=SCHEME.model_copy(update={"version": 2})),
        write(base, at="cache", kv_bits=8),
        write(base, at="config", config={"model_type": "llama", "rms_norm_eps": 1e-6}),
        write(base, at="norm", tensors={"model.norm.weight": torch.full((8,), 2.0)}),
        write(layers(2.0), at="scales"),
        write(rounded, at="activations"),
        write(base, at="vocabulary", files=(vocabulary,)),
        write(base, at="synthetic", synthetic=True),
    )

    assert len({hash_of(folder) for folder in folders}) == len(folders)


def test_config_contains_the_hash(write):
    folder = write(layers())

    config = json.loads((folder / "config.json").read_text())

    assert config["quantization_config"]["flexq_bench"]["content_hash"] == hash_of(folder)


def test_hash_with_cache_equals_that_of_a_written_one(write):
    some = {"model.layers.0.x": layers()["model.layers.0.x"]}
    plain, eight = (write(some, at=f"kv{bits}", kv_bits=bits) for bits in (16, 8))

    assert open_checkpoint(plain).hash_with_cache(8) == hash_of(eight)
    assert open_checkpoint(eight).hash_with_cache(16) == hash_of(plain)
    assert open_checkpoint(eight).hash_with_cache(8) == hash_of(eight)
