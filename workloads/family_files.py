"""Files of the model catalog: a family and its models."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from typing import Annotated, ClassVar

from workloads.data_files import (
    Count,
    DataTable,
    Entries,
    Flag,
    Text,
    read_toml,
    validated,
    wanted,
)
from workloads.model_spec import Block, ModelSpec


class _ModelTable(DataTable):
    """One model of a family's file: fields as of ModelSpec."""

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


class _FamilyTable(DataTable):
    """A family's file: what its models share, and the models."""

    family: Text
    block: Annotated[Block, wanted("llama or opt")]
    tied_embeddings: Flag
    learned_positions: Flag
    source: Text
    model: Entries[_ModelTable]


def read_family(file: Traversable) -> tuple[ModelSpec, ...]:
    """The models of one family's file. Raises WorkloadError if it has another form."""
    family = validated(_FamilyTable, read_toml(file), file.name)
    shared = family.model_dump(exclude={"model", "source"})
    return tuple(
        ModelSpec(
            **shared,
            **model.model_dump(exclude={"source"}),
            source=f"{family.source}; {model.source}",
        )
        for model in family.model
    )
