"""Files of the model catalog: a family and its models."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from typing import Annotated, ClassVar

from flexq_bench.workloads.blocks import BLOCK_TYPES, BlockType
from flexq_bench.workloads.data_files import (
    Count,
    DataTable,
    Entries,
    Flag,
    Natural,
    Text,
    must_be,
    read_toml,
    validated,
)
from flexq_bench.workloads.model_spec import Experts, LatentAttention, ModelSpec


class _ExpertsTable(DataTable):
    """Fields as in Experts."""

    count: Count
    active: Count
    ffn: Count
    shared: Natural = 0
    dense_blocks: Natural = 0


class _LatentTable(DataTable):
    """Fields as in LatentAttention."""

    kv_rank: Count
    nope_dim: Count
    rope_dim: Count
    value_dim: Count


class _ModelTable(DataTable):
    """One model of a family's file; fields as in ModelSpec."""

    NAME_KEY: ClassVar[str] = "name"
    name: Text
    hidden: Count
    ffn: Count
    layers: Count
    heads: Count
    kv_heads: Count
    vocab: Count
    context: Count
    source: Text
    head_dim: Count | None = None
    tied_embeddings: Flag | None = None
    experts: _ExpertsTable | None = None
    latent: _LatentTable | None = None

    def spec(self, family: _FamilyTable) -> ModelSpec:
        family_values = family.model_dump(exclude={"model", "source"})
        model_values = self.model_dump(exclude={"source", "experts", "latent"}, exclude_none=True)
        return ModelSpec(
            **family_values | model_values,
            source=f"{family.source}; {self.source}",
            experts=Experts(**self.experts.model_dump()) if self.experts else None,
            latent=LatentAttention(**self.latent.model_dump()) if self.latent else None,
        )


class _FamilyTable(DataTable):
    """A family's file: common values, and the models; a model may override tied_embeddings."""

    family: Text
    block: Annotated[BlockType, must_be(f"one of {', '.join(BLOCK_TYPES)}")]
    tied_embeddings: Flag
    learned_positions: Flag
    source: Text
    model: Entries[_ModelTable]


def read_family(file: Traversable) -> tuple[ModelSpec, ...]:
    """Return the models of a family's file. Raises WorkloadError if it is invalid."""
    family = validated(_FamilyTable, read_toml(file), file.name)
    return tuple(model.spec(family) for model in family.model)
