"""A model by its published dimensions, and the shapes of its linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workloads.errors import WorkloadError
from workloads.names import unknown

Block = Literal["llama", "opt"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One linear layer of a decoder block, weights [N,K]: n output and k input features.

    fused: several projections of the same input in one matrix, stacked along N.
    """

    name: str
    n: int
    k: int
    count_per_block: int = 1
    fused: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model by its published dimensions.

    block: "llama" (gated feed-forward: gate, up, down) or "opt" (fc1, fc2).
    kv_heads: fewer than heads in grouped-query attention; K and V are then narrower than Q.
    context: tokens. learned_positions: a table of `context` rows; False with rotary positions.
    Raises WorkloadError if the heads don't divide the hidden size or the KV heads the heads.
    """

    name: str
    family: str
    block: Block
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    tied_embeddings: bool
    learned_positions: bool
    source: str

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise WorkloadError(
                f"{self.name}: {self.heads} heads must divide hidden {self.hidden}, and "
                f"{self.kv_heads} KV heads must divide the heads"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Output features of the K projection, and of the V projection."""
        return self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Token embedding, output head where it is not the same matrix, learned positions."""
        tokens = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return tokens + (self.context * self.hidden if self.learned_positions else 0)

    def linear_layers(self, fused: bool = True) -> tuple[LayerShape, ...]:
        """The linear layers of one block in the order of the forward pass.

        fused: Q, K and V as one layer, and gate and up as one, as serving engines run them.
        The output head is not among them: no scheme quantizes it.
        """
        return (*self._attention(fused), *self._feed_forward(fused))

    def all_layers(self) -> tuple[LayerShape, ...]:
        """Every layer that has a name, each once: the fused ones, then what they are made of."""
        return tuple(dict.fromkeys((*self.linear_layers(), *self.linear_layers(fused=False))))

    def layer(self, name: str) -> LayerShape:
        """A layer by name, fused or separate. Raises WorkloadError with the nearest names."""
        shapes = {shape.name: shape for shape in self.all_layers()}
        if name not in shapes:
            raise WorkloadError(unknown(f"layer of {self.name} named", name, shapes))
        return shapes[name]

    def _attention(self, fused: bool) -> Iterator[LayerShape]:
        hidden, kv = self.hidden, self.kv_width
        if fused:
            yield LayerShape("qkv_proj", hidden + 2 * kv, hidden, fused=True)
        else:
            yield LayerShape("q_proj", hidden, hidden)
            yield LayerShape("k_proj", kv, hidden)
            yield LayerShape("v_proj", kv, hidden)
        yield LayerShape("out_proj" if self.block == "opt" else "o_proj", hidden, hidden)

    def _feed_forward(self, fused: bool) -> Iterator[LayerShape]:
        hidden, ffn = self.hidden, self.ffn
        if self.block == "opt":
            yield LayerShape("fc1", ffn, hidden)
            yield LayerShape("fc2", hidden, ffn)
            return
        if fused:
            yield LayerShape("gate_up_proj", 2 * ffn, hidden, fused=True)
        else:
            yield LayerShape("gate_proj", ffn, hidden)
            yield LayerShape("up_proj", ffn, hidden)
        yield LayerShape("down_proj", hidden, ffn)
