"""Weights of a Hugging Face folder: safetensors, whole or sharded, or a GGUF file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flexq_bench.decode.architecture import Architecture, of_config, of_folder
from flexq_bench.decode.weights import Affine, BlockWeights, Ends, WeightSource
from flexq_bench.errors import UsageError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def open_checkpoint(path: Path) -> WeightSource:
    """A folder or a .gguf file. Raises UsageError: nothing there, no configuration, no shard."""
    if path.suffix == ".gguf":
        return open_gguf(path)
    if not path.is_dir():
        raise UsageError(f"no model {str(path)!r}: give a catalog name, a folder or a .gguf file")
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return open_gguf(files[0])
    return FolderWeights(path)


class _NamedTensors(WeightSource):
    """Weights by the names that transformers gives them."""

    is_synthetic = False

    @abstractmethod
    def _tensor(self, name: str) -> torch.Tensor:
        """Raises UsageError if there is none of this name."""

    @abstractmethod
    def _has(self, name: str) -> bool: ...

    def ends(self, device: torch.device) -> Ends:
        if self.architecture.block == "opt":
            root = "model.decoder" if self._has("model.decoder.embed_tokens.weight") else "decoder"
            positions = self._load(f"{root}.embed_positions.weight", device)
            norm = self._affine(f"{root}.final_layer_norm", device)
        else:
            root, positions = "model", None
            norm = self._affine(f"{root}.norm", device)
        embedding = self._load(f"{root}.embed_tokens.weight", device)
        tied = self.architecture.dimensions.tied_embeddings
        head = embedding if tied else self._load("lm_head.weight", device)
        return Ends(embedding, positions, norm, head)

    def block(self, index: int, device: torch.device) -> BlockWeights:
        if self.architecture.block == "opt":
            root = "model.decoder" if self._has("model.decoder.embed_tokens.weight") else "decoder"
            at = f"{root}.layers.{index}"
            return BlockWeights(
                {
                    "qkv_proj": self._stacked(f"{at}.self_attn", "qkv", device),
                    "out_proj": self._affine(f"{at}.self_attn.out_proj", device),
                    "fc1": self._affine(f"{at}.fc1", device),
                    "fc2": self._affine(f"{at}.fc2", device),
                },
                self._affine(f"{at}.self_attn_layer_norm", device),
                self._affine(f"{at}.final_layer_norm", device),
            )
        at = f"model.layers.{index}"
        gate, up = (self._affine(f"{at}.mlp.{name}_proj", device) for name in ("gate", "up"))
        return BlockWeights(
            {
                "qkv_proj": self._stacked(f"{at}.self_attn", "qkv", device),
                "o_proj": self._affine(f"{at}.self_attn.o_proj", device),
                "gate_up_proj": _stack(gate, up),
                "down_proj": self._affine(f"{at}.mlp.down_proj", device),
            },
            self._affine(f"{at}.input_layernorm", device),
            self._affine(f"{at}.post_attention_layernorm", device),
        )

    def _stacked(self, at: str, letters: str, device: torch.device) -> Affine:
        return _stack(*(self._affine(f"{at}.{letter}_proj", device) for letter in letters))

    def _affine(self, name: str, device: torch.device) -> Affine:
        bias = f"{name}.bias"
        weight = self._load(f"{name}.weight", device)
        return Affine(weight, self._load(bias, device) if self._has(bias) else None)

    def _load(self, name: str, device: torch.device) -> torch.Tensor:
        return self._tensor(name).to(device=device, dtype=torch.float16)


class FolderWeights(_NamedTensors):
    """Reads tensors from disk when they are asked for: host memory holds one at a time."""

    def __init__(self, folder: Path) -> None:
        self.architecture: Architecture = of_folder(folder)
        self._files = _files_by_tensor(folder)
        self._open: dict[Path, Any] = {}

    def _has(self, name: str) -> bool:
        return name in self._files

    def _tensor(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        if name not in self._files:
            raise UsageError(f"the model has no tensor {name!r}: its config.json is of another one")
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"can't read {path}: {error}: download the model again") from error
        return tensor


class StateDictWeights(_NamedTensors):
    """The tensors of a transformers model in memory."""

    def __init__(self, architecture: Architecture, tensors: Mapping[str, torch.Tensor]) -> None:
        self.architecture = architecture
        self._tensors = tensors

    def _has(self, name: str) -> bool:
        return name in self._tensors

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UsageError(f"the model has no tensor {name!r}: it is of another architecture")
        return self._tensors[name]


def open_gguf(path: Path) -> StateDictWeights:
    """A GGUF file, dequantized by transformers: all of it is in host memory. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r}: give a catalog name, a folder or a .gguf file")
    try:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    except ImportError as error:
        raise UsageError(
            f"{path.name} needs transformers and gguf: pip install 'flexq-bench[test]'"
        ) from error
    except Exception as error:  # of a damaged file its reader raises whatever it stumbles over
        raise UsageError(f"can't read {path}: {error}: download the model again") from error
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return StateDictWeights(of_config(config, path.stem.split(".")[0]), model.state_dict())


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """Which file has which tensor. Raises UsageError if a file is missing or damaged."""
    index = folder / _INDEX
    if index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"can't read {index}: {error}") from error
        missing = sorted({file for file in named.values() if not (folder / file).is_file()})
        if missing:
            raise UsageError(
                f"{folder} lacks {', '.join(missing)} of {_INDEX}: download the model again"
            )
        return {name: folder / file for name, file in named.items()}
    whole = folder / _WHOLE
    if not whole.is_file():
        raise UsageError(f"{folder} has neither {_WHOLE} nor {_INDEX}: download the model again")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"can't read {whole}: {error}: download the model again") from error


def _stack(*parts: Affine) -> Affine:
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    return Affine(weight, torch.cat(biases) if len(biases) == len(parts) else None)
