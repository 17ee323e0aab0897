"""Published dimensions of a model, and the shapes of its linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from flexq_bench.workloads.blocks import LAYERS, BlockType, Projection
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.names import unknown


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One linear layer of a decoder block, weights [N,K]: n output and k input features.

    count: matrices of this name in the model: one per block, or one per routed expert of a block.
    fused: several projections of one input stacked along N.
    """

    name: str
    n: int
    k: int
    count: int = 1
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture-of-experts feed-forward in all blocks except the first `dense_blocks`.

    count: routed experts per block, of which a token uses `active`. ffn: width of an expert.
    shared: experts used by every token, stored as one matrix, `shared` times as wide.
    """

    count: int
    active: int
    ffn: int
    shared: int = 0
    dense_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are projections of a latent vector of kv_rank.

    Dimensions per head: queries and keys without RoPE (nope_dim) and with it (rope_dim), and
    values (value_dim).
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Published dimensions of a decoder-only model.

    block: block type (`workloads/blocks.py`). ffn: width of the dense feed-forward. kv_heads: fewer
    than heads in grouped-query attention; K and V are then narrower than Q. head_dim: 0: hidden /
    heads. context: tokens. learned_positions: an embedding of `context` rows; False: rotary.

    Raises WorkloadError if heads does not divide hidden although head_dim is 0, if kv_heads does
    not divide heads, or if the block type needs experts or latent.
    """

    name: str
    family: str
    block: BlockType
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
    head_dim: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        if (not self.head_dim and self.hidden % self.heads) or self.heads % self.kv_heads:
            raise WorkloadError(
                f"{self.name}: {self.heads} heads must divide hidden {self.hidden}, and "
                f"{self.kv_heads} KV heads must divide the heads"
            )
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        known = self.widths
        for projection in LAYERS[self.block]:
            for width in (projection.n, projection.k):
                if width not in known:
                    missing = "latent" if width.startswith("latent") else "experts"
                    raise WorkloadError(f"{self.name}: a block {self.block} needs {missing}")

    @property
    def widths(self) -> Mapping[str, int]:
        """Number of features by the names of widths in `workloads/blocks.py`."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {
            "hidden": self.hidden,
            "queries": queries,
            "keys": keys,
            "queries_keys_values": queries + 2 * keys,
            "ffn": self.ffn,
            "gate_up": 2 * self.ffn,
        }
        if self.experts is not None:
            ffn = self.experts.ffn
            widths |= {"expert_ffn": ffn, "shared_ffn": ffn * self.experts.shared}
        if self.latent is not None:
            a = self.latent
            widths |= {
                "latent": a.kv_rank,
                "latent_and_positions": a.kv_rank + a.rope_dim,
                "latent_queries": self.heads * (a.nope_dim + a.rope_dim),
                "latent_keys_values": self.heads * (a.nope_dim + a.value_dim),
                "latent_values": self.heads * a.value_dim,
            }
        return widths

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, an untied output head, and learned positions."""
        tokens = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return tokens + (self.context * self.hidden if self.learned_positions else 0)

    def linear_layers(self, fused: bool = True) -> tuple[LayerShape, ...]:
        """Return the linear layers of a block in the order of the forward pass, experts once.

        fused: projections of one input as one layer (Q, K and V; gate and up), as in serving
        engines. A model whose first blocks differ has the layers of both kinds of block. The
        output head and expert routers are left out: no scheme quantizes them.
        """
        layers = (p for p in LAYERS[self.block] if self._count(p))
        if not fused:
            return tuple(self._shape(p) for p in layers)
        return tuple(self._stack_fused(layers))

    def all_layers(self) -> tuple[LayerShape, ...]:
        """Return all distinct layers: with fused projections, then with separate ones."""
        return tuple(dict.fromkeys((*self.linear_layers(), *self.linear_layers(fused=False))))

    def layer(self, name: str) -> LayerShape:
        """Return a fused or separate layer by name. Raises WorkloadError with the nearest names."""
        shapes = {shape.name: shape for shape in self.all_layers()}
        if name not in shapes:
            raise WorkloadError(unknown(f"layer of {self.name} named", name, shapes))
        return shapes[name]

    def _stack_fused(self, layers: Iterator[Projection]) -> Iterator[LayerShape]:
        for name, group in groupby(layers, key=lambda p: p.fused or p.name):
            parts = [self._shape(p) for p in group]
            n = sum(part.n for part in parts)
            yield replace(parts[0], name=name, n=n, fused=len(parts) > 1)

    def _shape(self, projection: Projection) -> LayerShape:
        widths = self.widths
        n, k = widths[projection.n], widths[projection.k]
        return LayerShape(projection.name, n, k, self._count(projection))

    def _count(self, projection: Projection) -> int:
        """Return the number of matrices of this projection in the model."""
        if projection.place == "every":
            return self.layers
        dense = self.layers if self.experts is None else self.experts.dense_blocks
        if projection.place == "dense":
            return dense
        experts = self.experts or Experts(0, 0, 0)
        in_block = experts.count if projection.place == "routed" else min(experts.shared, 1)
        return (self.layers - dense) * in_block
