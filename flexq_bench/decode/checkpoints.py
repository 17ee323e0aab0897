"""Weights of a Hugging Face folder: safetensors, whole or sharded, or a GGUF file."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flexq_bench.decode.architecture import OPT_POSITION_OFFSET, Architecture, of_config
from flexq_bench.decode.weights import Affine, BlockWeights, Ends, WeightSource
from flexq_bench.errors import UsageError
from flexq_bench.schemes.model_files import CONFIG, ModelFiles, StoredTensor, is_there, model_at

# Where transformers has a block's layers and norms, by the name of the fused layer.
_LLAMA_LAYERS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
_OPT_LAYERS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out_proj": ("self_attn.out_proj",),
    "fc1": ("fc1",),
    "fc2": ("fc2",),
}
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_OPT_NORMS = ("self_attn_layer_norm", "final_layer_norm")
_IN_A_BLOCK = re.compile(r"layers\.\d+\..*(weight|bias)$")


def open_checkpoint(path: Path) -> WeightSource:
    """A folder or a .gguf file. Raises UsageError: nothing there, or not all of a model we have."""
    if not is_there(path):
        raise UsageError(f"no model {str(path)!r}: give a catalog name, a folder or a .gguf file")
    files = model_at(path)
    if files.gguf is not None:
        return open_gguf(files.folder / files.gguf)
    return FolderWeights(files)


class _NamedTensors(WeightSource):
    """Weights by the names that transformers gives them.

    shapes: of all there are, by name. Raises UsageError unless they are the architecture's.
    """

    is_synthetic = False

    def __init__(self, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.architecture = architecture
        self._is_opt = architecture.block == "opt"
        self._root = "model"
        if self._is_opt:
            whole = "model.decoder.embed_tokens.weight" in shapes
            self._root = "model.decoder" if whole else "decoder"
        _check(architecture.dimensions.name, dict(shapes), self._expected())

    @abstractmethod
    def _tensor(self, name: str) -> torch.Tensor:
        """One of those there are."""

    def ends(self, device: torch.device) -> Ends:
        positions = None
        if self._is_opt:
            positions = self._load(f"{self._root}.embed_positions.weight", device)
        embedding = self._load(f"{self._root}.embed_tokens.weight", device)
        tied = self.architecture.dimensions.tied_embeddings
        head = embedding if tied else self._load("lm_head.weight", device)
        return Ends(embedding, positions, self._affine(self._last_norm, device, self._is_opt), head)

    def block(self, index: int, device: torch.device) -> BlockWeights:
        at = f"{self._root}.layers.{index}"
        biased = self.architecture.biased
        linears = {
            name: _stack(*(self._affine(f"{at}.{part}", device, name in biased) for part in parts))
            for name, parts in self._layers.items()
        }
        norms = (self._affine(f"{at}.{name}", device, self._is_opt) for name in self._norms)
        return BlockWeights(linears, *norms)

    @property
    def _layers(self) -> Mapping[str, tuple[str, ...]]:
        return _OPT_LAYERS if self._is_opt else _LLAMA_LAYERS

    @property
    def _norms(self) -> tuple[str, str]:
        return _OPT_NORMS if self._is_opt else _LLAMA_NORMS

    @property
    def _last_norm(self) -> str:
        return f"{self._root}.final_layer_norm" if self._is_opt else f"{self._root}.norm"

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the architecture."""
        model = self.architecture.dimensions
        yield f"{self._root}.embed_tokens.weight", (model.vocab, model.hidden)
        if not model.tied_embeddings:
            yield "lm_head.weight", (model.vocab, model.hidden)
        if self._is_opt:
            rows = model.context + OPT_POSITION_OFFSET
            yield f"{self._root}.embed_positions.weight", (rows, model.hidden)
        yield from _pair(self._last_norm, (model.hidden,), self._is_opt)
        for index in range(model.layers):
            at = f"{self._root}.layers.{index}"
            for norm in self._norms:
                yield from _pair(f"{at}.{norm}", (model.hidden,), self._is_opt)
            for name, parts in self._layers.items():
                for part in parts:
                    shape = _shape(self.architecture, part.rpartition(".")[-1])
                    yield from _pair(f"{at}.{part}", shape, name in self.architecture.biased)

    def _affine(self, name: str, device: torch.device, biased: bool) -> Affine:
        weight = self._load(f"{name}.weight", device)
        return Affine(weight, self._load(f"{name}.bias", device) if biased else None)

    def _load(self, name: str, device: torch.device) -> torch.Tensor:
        tensor = self._tensor(name).to(device=device, dtype=torch.float16)
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(
                f"{self.architecture.dimensions.name}: {name} holds NaN or infinity in FP16: "
                "download the model again, or pick one whose weights FP16 can hold"
            )
        return tensor


class FolderWeights(_NamedTensors):
    """Reads tensors from disk when they are asked for: host memory holds one at a time."""

    def __init__(self, files: ModelFiles) -> None:
        self._stored: Mapping[str, StoredTensor] = files.tensors
        self._open: dict[Path, Any] = {}
        architecture = of_config(files.config(), files.name)
        super().__init__(architecture, {name: t.shape for name, t in files.tensors.items()})

    def _tensor(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._stored[name].path
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
        self._tensors = tensors
        super().__init__(architecture, {name: tuple(t.shape) for name, t in tensors.items()})

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def open_gguf(path: Path) -> StateDictWeights:
    """A GGUF file, dequantized by transformers: all of it is in host memory. Raises UsageError."""
    try:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    except ImportError as error:
        raise UsageError(
            f"{path.name} needs transformers and gguf: pip install 'flexq-bench[accuracy]'"
        ) from error
    except Exception as error:  # of a damaged file its reader raises whatever it stumbles over
        raise UsageError(f"can't read {path}: {error}: download the model again") from error
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return StateDictWeights(of_config(config, path.stem.split(".")[0]), model.state_dict())


def _check(
    model: str,
    shapes: dict[str, tuple[int, ...]],
    expected: Iterator[tuple[str, tuple[int, ...]]],
) -> None:
    """Raise UsageError where tensors are missing, of another shape, or more than expected."""
    for name, shape in expected:
        given = shapes.pop(name, None)
        if given is None:
            raise UsageError(f"{model} has no tensor {name}: its {CONFIG} is of another model")
        if given != shape:
            raise UsageError(
                f"{model}: {name} is {list(given)}, its {CONFIG} asks for {list(shape)}: download "
                "it again"
            )
    unused = sorted(name for name in shapes if _IN_A_BLOCK.search(name))
    if unused:
        raise UsageError(
            f"{model} has {len(unused)} weights that its {CONFIG} has no place for "
            f"({unused[0]} …): it would be decoded in part; download it again"
        )


def _pair(name: str, shape: tuple[int, ...], biased: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    if biased:
        yield f"{name}.bias", shape[:1]


def _shape(architecture: Architecture, kind: str) -> tuple[int, int]:
    """Output and input features of a layer by its kind."""
    model, head_dim = architecture.dimensions, architecture.head_dim
    queries, kv = model.heads * head_dim, model.kv_heads * head_dim
    return {
        "q_proj": (queries, model.hidden),
        "k_proj": (kv, model.hidden),
        "v_proj": (kv, model.hidden),
        "o_proj": (model.hidden, queries),
        "out_proj": (model.hidden, queries),
        "gate_proj": (model.ffn, model.hidden),
        "up_proj": (model.ffn, model.hidden),
        "down_proj": (model.hidden, model.ffn),
        "fc1": (model.ffn, model.hidden),
        "fc2": (model.hidden, model.ffn),
    }[kind]


def _stack(*parts: Affine) -> Affine:
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    return Affine(weight, torch.cat(biases) if biases else None)
