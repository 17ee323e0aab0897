"""Sources of a decoder's weights, which are read one block at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from flexq_bench.decode.architecture import LAYERS, OPT_POSITION_OFFSET, DecoderArchitecture
from flexq_bench.kernels.formats import FP16, quantize
from flexq_bench.measure.inputs import WEIGHT_STD, derive_seed
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.quantized_layer import QuantizedLayer

# Kinds of layers, as in schemes.model_map, of which a fused layer consists; others are not fused.
EXPERT_LAYERS = ("gate_up_proj", "down_proj")  # that each expert has
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class Affine:
    """A norm's weight [K] and bias [K], FP16. bias None: there is none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights of a block. linears: by fused layer name. Norms: before attention and feed-forward.

    head_norms: weights [head_dim] of the norms of each head of queries and of keys; None: none.
    router: FP16 [experts, hidden]; None: no experts. Layers of experts are stacked along N.
    """

    linears: dict[str, QuantizedLayer]
    attention_norm: Affine
    ffn_norm: Affine
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    router: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """Weights outside the blocks. embedding [vocab, hidden]; positions: learned ones, None: rotary.

    head [vocab, hidden]: may be the embedding itself.
    """

    embedding: torch.Tensor
    positions: torch.Tensor | None
    norm: Affine
    head: torch.Tensor


class WeightSource(ABC):
    """Weights on a device, codes or FP16, read or generated on demand.

    content_hashes: of their checkpoint, by the bits of the KV cache; empty: not from a checkpoint.
    scheme_version: of the scheme that quantized them; None: not quantized.
    """

    architecture: DecoderArchitecture
    is_synthetic: bool
    content_hashes: Mapping[int, str] = MappingProxyType({})
    scheme_version: int | None = None

    @property
    def whole(self) -> DecoderArchitecture:
        """Architecture of the blocks as they are read, of which these may be a share."""
        return self.architecture

    @abstractmethod
    def formats(self) -> dict[str, LayerFormats]:
        """Formats of a block's fused layers by name; of the first block if blocks differ."""

    @abstractmethod
    def ends(self, device: torch.device) -> Ends:
        """Embeddings, final norm and head."""

    def fp8_scales(self, index: int) -> torch.Tensor | None:
        """FP32 [2, KV heads], scales of a block's cached keys and values; None: not FP8."""
        return None

    @abstractmethod
    def block(self, index: int, device: torch.device) -> BlockWeights:
        """Return one block's weights; the caller frees them before it reads the next block."""


class DenseWeights(WeightSource):
    """FP16 weights."""

    def formats(self) -> dict[str, LayerFormats]:
        return {name: LayerFormats(FP16) for name, _, _ in layer_sizes(self.architecture)}


class SyntheticWeights(DenseWeights):
    """Normally distributed weights of a model's shapes, for measurements of speed."""

    is_synthetic = True

    def __init__(self, architecture: DecoderArchitecture, seed: int) -> None:
        self.architecture = architecture
        self._seed = seed

    def ends(self, device: torch.device) -> Ends:
        model = self.architecture.dimensions
        draw = self._drawer(device, "ends")
        embedding = draw(model.vocab, model.hidden)
        positions = None
        if model.learned_positions:
            positions = draw(model.context + OPT_POSITION_OFFSET, model.hidden)
        head = embedding if model.tied_embeddings else draw(model.vocab, model.hidden)
        return Ends(embedding, positions, self._norm(device), head)

    def block(self, index: int, device: torch.device) -> BlockWeights:
        draw = self._drawer(device, index)
        biased = self.architecture.biased
        linears = {
            name: dense_layer(draw(n, k), draw(n) if name in biased else None)
            for name, n, k in layer_sizes(self.architecture)
        }
        heads = None
        if self.architecture.norms_heads:
            weight = torch.ones(self.architecture.head_dim, dtype=torch.float16, device=device)
            heads = weight, weight
        model = self.architecture.dimensions
        router = None if model.experts is None else draw(model.experts.count, model.hidden)
        return BlockWeights(linears, self._norm(device), self._norm(device), heads, router)

    def _drawer(self, device: torch.device, part: object) -> _Drawer:
        seed = derive_seed(self._seed, self.architecture.dimensions.name, part)
        return _Drawer(torch.Generator(device).manual_seed(seed), device)

    def _norm(self, device: torch.device) -> Affine:
        size = self.architecture.dimensions.hidden
        weight = torch.ones(size, dtype=torch.float16, device=device)
        bias = torch.zeros_like(weight) if self.architecture.block == "opt" else None
        return Affine(weight, bias)


@dataclass(frozen=True, slots=True)
class _Drawer:
    generator: torch.Generator
    device: torch.device

    def __call__(self, *shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.float16, device=self.device)
        return values.normal_(0.0, WEIGHT_STD, generator=self.generator)


def dense_layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedLayer:
    """An FP16 layer: weight [N,K], bias [N]."""
    return QuantizedLayer(quantize(weight, FP16), None, bias)


def parts_of(name: str) -> tuple[str, ...]:
    """Kinds of the layers that a fused layer consists of, in the order of its rows."""
    return _PARTS.get(name, (name,))


def layer_shape(architecture: DecoderArchitecture, kind: str) -> tuple[int, int]:
    """Output and input features of a layer by its kind; of one expert."""
    model, head_dim = architecture.dimensions, architecture.head_dim
    queries, kv = model.heads * head_dim, model.kv_heads * head_dim
    ffn = model.ffn if model.experts is None else model.experts.ffn
    return {
        "q_proj": (queries, model.hidden),
        "k_proj": (kv, model.hidden),
        "v_proj": (kv, model.hidden),
        "o_proj": (model.hidden, queries),
        "out_proj": (model.hidden, queries),
        "gate_proj": (ffn, model.hidden),
        "up_proj": (ffn, model.hidden),
        "down_proj": (model.hidden, ffn),
        "fc1": (model.ffn, model.hidden),
        "fc2": (model.hidden, model.ffn),
    }[kind]


def layer_sizes(architecture: DecoderArchitecture) -> list[tuple[str, int, int]]:
    """Name, N and K of a block's fused linear layers, in the order of the forward pass.

    N of experts' layers is that of all experts.
    """
    sizes, experts = [], architecture.dimensions.experts
    for name in LAYERS[architecture.block]:
        shapes = [layer_shape(architecture, kind) for kind in parts_of(name)]
        count = experts.count if experts is not None and name in EXPERT_LAYERS else 1
        sizes.append((name, count * sum(n for n, _ in shapes), shapes[0][1]))
    return sizes
