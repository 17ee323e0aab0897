"""Layers of every format, checkpoints of them, and a small model in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flexq_bench.checkpoints.config import Extension, StoredScheme
from flexq_bench.checkpoints.writer import SHARD_BYTES, CheckpointWriter
from flexq_bench.schemes.calibration import Calibration

sys.path.insert(0, str(Path(__file__).parent))  # its helper same_layers

SCHEME = StoredScheme(name="w6a6", version=1, options={"w_bits": 6}, seed=3)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Matrices this small take longest where several threads share them."""
    torch.set_num_threads(1)


@pytest.fixture
def write(tmp_path):
    """write(layers): a folder with these layers, and a norm; other arguments are of its Extension.

    at: where. tensors: that are not quantized. files: copied into it.
    """

    def build(
        layers,
        *,
        at="checkpoint",
        config=None,
        scheme=SCHEME,
        tensors=None,
        files=(),
        shard_bytes=SHARD_BYTES,
        overwrite=False,
        **extension,
    ):
        folder = tmp_path / at
        with CheckpointWriter(
            folder,
            config or {"model_type": "llama"},
            Extension(scheme=scheme, layers={}, **{"kv_bits": 16, **extension}),
            shard_bytes=shard_bytes,
            overwrite=overwrite,
        ) as writer:
            for path in files:
                writer.add_file(path)
            for name, layer in layers.items():
                writer.add_layer(name, layer)
            for name, tensor in (tensors or {"model.norm.weight": torch.ones(8)}).items():
                writer.add_tensor(name, tensor)
            writer.finish()
        return folder

    return build


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory, llama_config):
    """A folder: 3 blocks, 4 heads on 2 key-value heads, K of 64 and 160; FP32, no tokenizer."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(64, 160, 96, num_hidden_layers=3))
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def calibration():
    generator = torch.Generator().manual_seed(1)
    return Calibration(torch.randint(0, 96, (3, 16), generator=generator))
