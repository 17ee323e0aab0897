"""Weights by transformers' names; FP16 weights of a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path

import torch

from flexq_bench.checkpoints.model_source import expected_tensors, open_source
from flexq_bench.checkpoints.streaming import without_weights
from flexq_bench.decode.architecture import OPT_POSITION_OFFSET, DecoderArchitecture, of_config
from flexq_bench.decode.fused_layers import fused
from flexq_bench.decode.weights import (
    EXPERT_LAYERS,
    Affine,
    BlockWeights,
    DenseWeights,
    Ends,
    WeightSource,
    dense_layer,
    layer_shape,
    layer_sizes,
    parts_of,
)
from flexq_bench.errors import UsageError
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_files import ModelFiles, is_there, model_at
from flexq_bench.schemes.quantized_layer import QuantizedLayer

# Submodules of transformers' blocks with these kinds of layers; others are in the block itself.
_MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_ROUTER = "mlp.gate"
_CPU = torch.device("cpu")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
OPT_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def open_weights(path: Path) -> DenseWeights:
    """Open a folder or .gguf file. Raises UsageError if missing, incomplete or unsupported."""
    if not is_there(path):
        raise UsageError(f"no model {str(path)!r}: give a catalog name, a folder or a .gguf file")
    return DenseModelWeights(model_at(path))


class NamedWeights(WeightSource):
    """Weights by the names of transformers. names: of all tensors."""

    is_synthetic = False

    def __init__(self, architecture: DecoderArchitecture, names: Collection[str]) -> None:
        self.architecture = architecture
        self._names = names
        self._is_opt = architecture.block == "opt"
        self._root = "model"
        if self._is_opt:
            has_head = "model.decoder.embed_tokens.weight" in names
            self._root = "model.decoder" if has_head else "decoder"

    @abstractmethod
    def _tensor(self, name: str) -> torch.Tensor:
        """Read a tensor by name."""

    def _layer(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedLayer:
        """Read the linear layer of this name. shape: N, K."""
        biased = f"{name}.bias" in self._names
        return dense_layer(
            self._load(f"{name}.weight", device),
            self._load(f"{name}.bias", device) if biased else None,
        )

    def formats(self) -> dict[str, LayerFormats]:
        return self._first_formats

    @cached_property
    def _first_formats(self) -> dict[str, LayerFormats]:
        layers = self.block(0, _CPU).linears
        return {name: layer.formats for name, layer in layers.items()}

    def ends(self, device: torch.device) -> Ends:
        positions = None
        if self._is_opt:
            positions = self._load(f"{self._root}.embed_positions.weight", device)
        embedding = self._load(f"{self._root}.embed_tokens.weight", device)
        tied = self.architecture.dimensions.tied_embeddings
        head = embedding if tied else self._load("lm_head.weight", device)
        return Ends(embedding, positions, self._norm(self._last_norm, device), head)

    def block(self, index: int, device: torch.device) -> BlockWeights:
        linears = {
            name: fused(
                [
                    (path, self._layer(path, layer_shape(self.architecture, kind), device))
                    for kind, path in self._paths(index, name)
                ]
            )
            for name in self._fused_names
        }
        block = f"{self._root}.layers.{index}"
        heads = None
        if self.architecture.norms_heads:
            queries, keys = (self._load(f"{block}.{name}.weight", device) for name in HEAD_NORMS)
            heads = queries, keys
        attention, feed_forward = (self._norm(f"{block}.{name}", device) for name in self._norms)
        router = None
        if self.architecture.dimensions.experts is not None:
            router = self._load(f"{block}.{_ROUTER}.weight", device)
        return BlockWeights(linears, attention, feed_forward, heads, router)

    def _paths(self, index: int, name: str) -> Iterator[tuple[str, str]]:
        """Kind and path of each layer that a fused layer consists of, expert by expert."""
        experts = self.architecture.dimensions.experts
        if experts is None or name not in EXPERT_LAYERS:
            yield from ((kind, self.path(index, kind)) for kind in parts_of(name))
            return
        for expert in range(experts.count):
            for kind in parts_of(name):
                yield kind, f"{self.path(index)}.mlp.experts.{expert}.{kind}"

    @property
    def _fused_names(self) -> list[str]:
        return [name for name, _, _ in layer_sizes(self.architecture)]

    def path(self, index: int, kind: str = "") -> str:
        """Name of a block, or of its layer of this kind."""
        block = f"{self._root}.layers.{index}"
        return f"{block}.{path_in_block(kind)}" if kind else block

    @property
    def _norms(self) -> tuple[str, str]:
        return OPT_NORMS if self._is_opt else LLAMA_NORMS

    @property
    def _last_norm(self) -> str:
        return f"{self._root}.final_layer_norm" if self._is_opt else f"{self._root}.norm"

    def _dense_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the architecture outside linear layers."""
        model = self.architecture.dimensions
        yield f"{self._root}.embed_tokens.weight", (model.vocab, model.hidden)
        if not model.tied_embeddings:
            yield "lm_head.weight", (model.vocab, model.hidden)
        if self._is_opt:
            rows = model.context + OPT_POSITION_OFFSET
            yield f"{self._root}.embed_positions.weight", (rows, model.hidden)
        yield from _pair(self._last_norm, (model.hidden,), self._is_opt)
        for index in range(model.layers):
            block = f"{self._root}.layers.{index}"
            for norm in self._norms:
                yield from _pair(f"{block}.{norm}", (model.hidden,), self._is_opt)
            for norm in HEAD_NORMS if self.architecture.norms_heads else ():
                yield f"{block}.{norm}.weight", (self.architecture.head_dim,)
            if model.experts is not None:
                yield f"{block}.{_ROUTER}.weight", (model.experts.count, model.hidden)

    def _layers(self) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Name and shape of every linear layer of the architecture, and True if it has a bias."""
        for index in range(self.architecture.dimensions.layers):
            for name in self._fused_names:
                for kind, path in self._paths(index, name):
                    shape = layer_shape(self.architecture, kind)
                    yield path, shape, name in self.architecture.biased

    def _norm(self, name: str, device: torch.device) -> Affine:
        weight = self._load(f"{name}.weight", device)
        return Affine(weight, self._load(f"{name}.bias", device) if self._is_opt else None)

    def _load(self, name: str, device: torch.device) -> torch.Tensor:
        tensor = self._tensor(name).to(device=device, dtype=torch.float16)
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(
                f"{self.architecture.dimensions.name}: {name} holds NaN or infinity in FP16: "
                "download the model again, or pick one whose weights FP16 can hold"
            )
        return tensor


class DenseModelWeights(DenseWeights, NamedWeights):
    """FP16 weights of a folder or GGUF file, read on demand, one tensor in host memory at a time.

    Raises UsageError if decode doesn't support the model, or its tensors don't match its
    configuration.
    """

    def __init__(self, files: ModelFiles) -> None:
        # before the model is built, so that an unsupported one is named by its class
        described = None if files.gguf is not None else of_config(files.config(), files.name)
        self._source = open_source(files)
        model = without_weights(self._source)
        config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        self._source.bind(model, linear_origins(model))
        super().__init__(described or of_config(config, files.name), expected_tensors(model))

    def _tensor(self, name: str) -> torch.Tensor:
        (_, tensor) = next(iter(self._source.read([name], _CPU)))
        return tensor


def _pair(name: str, shape: tuple[int, ...], biased: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    if biased:
        yield f"{name}.bias", shape[:1]


def path_in_block(kind: str) -> str:
    """Name of a layer of this kind within its block, for example self_attn.q_proj."""
    module = next((name for name, kinds in _MODULES.items() if kind in kinds), "")
    return f"{module}.{kind}" if module else kind
