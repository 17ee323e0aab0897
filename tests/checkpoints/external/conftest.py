"""Folders as others write them: tiny-llama, its linear layers quantized by hand or by a library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
TINY_LLAMA = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"


@pytest.fixture(scope="session")
def tiny_llama():
    """The folder of the model that the repository ships."""
    return TINY_LLAMA


@pytest.fixture(scope="session")
def dense_tensors():
    """Tensors of tiny-llama's first two blocks and of all outside blocks: K of 128 and 256."""
    tensors = load_file(TINY_LLAMA / "model.safetensors")
    others = ("model.layers.2.", "model.layers.3.")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(others)}


@pytest.fixture
def a_folder(dense_tensors, tmp_path):
    """a_folder(section, quantized): tiny-llama with this `quantization_config`.

    quantized(name, weight): the tensors of a layer without its name, in place of its weight; None:
    it stays. change: of all tensors, at the end.
    """

    def build(section, quantized, *, change=lambda tensors: tensors, **config):
        folder = Path(shutil.copytree(TINY_LLAMA, tmp_path / "model", dirs_exist_ok=True))
        tensors: Tensors = {}
        for full, weight in dense_tensors.items():
            name = full.removesuffix(".weight")
            parts = quantized(name, weight) if name.endswith("_proj") else None
            tensors |= {full: weight} if parts is None else {
                f"{name}.{part}": tensor for part, tensor in parts.items()
            }  # fmt: skip
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in change(tensors).items()},
            folder / "model.safetensors",
        )
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**text, "num_hidden_layers": 2, **config, "quantization_config": section})
        )
        return folder

    return build
