"""Schemes: how a model is quantized, as the kernel of each of its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import ClassVar

from workloads.data_files import DataTable, Entries, Text, read_toml, validated
from workloads.errors import WorkloadError
from workloads.model_spec import Block
from workloads.names import unknown


class _LlamaTable(DataTable):
    """Exceptions of a LLaMA block."""

    qkv_proj: Text | None = None
    o_proj: Text | None = None
    gate_up_proj: Text | None = None
    down_proj: Text | None = None


class _OptTable(DataTable):
    """Exceptions of an OPT block."""

    qkv_proj: Text | None = None
    out_proj: Text | None = None
    fc1: Text | None = None
    fc2: Text | None = None


_LAYERS: Mapping[Block, type[DataTable]] = {"llama": _LlamaTable, "opt": _OptTable}


@dataclass(frozen=True, slots=True)
class Scheme:
    """kernel: label of all linear layers but the exceptions, by block and fused layer name."""

    name: str
    summary: str
    source: str
    kernel: str
    exceptions: Mapping[Block, Mapping[str, str]] = field(default_factory=dict)

    def kernel_of(self, block: Block, layer: str) -> str:
        """Label of the kernel that computes a fused layer of a kind of block."""
        return self.exceptions.get(block, {}).get(layer, self.kernel)

    def kernels(self, block: Block) -> tuple[str, ...]:
        """Every label that a model of this block needs, each once."""
        layers = _LAYERS[block].model_fields
        return tuple(dict.fromkeys(self.kernel_of(block, name) for name in layers))


def get_scheme(name: str) -> Scheme:
    """A scheme by name. Raises WorkloadError that lists the nearest names first."""
    schemes = load_schemes()
    if name not in schemes:
        raise WorkloadError(unknown("scheme", name, schemes))
    return schemes[name]


@cache
def load_schemes() -> Mapping[str, Scheme]:
    """Every scheme by name, in the order of the file."""
    return read_schemes(resources.files("workloads") / "schemes.toml")


class _SchemeTable(DataTable):
    """One scheme: fields as of Scheme."""

    NAME_KEY: ClassVar[str] = "name"
    name: Text
    summary: Text
    source: Text
    kernel: Text
    llama: _LlamaTable | None = None
    opt: _OptTable | None = None

    def scheme(self) -> Scheme:
        blocks: tuple[tuple[Block, DataTable | None], ...] = (
            ("llama", self.llama),
            ("opt", self.opt),
        )
        exceptions = {
            block: layers.model_dump(exclude_none=True) for block, layers in blocks if layers
        }
        return Scheme(self.name, self.summary, self.source, self.kernel, exceptions)


class _SchemesTable(DataTable):
    scheme: Entries[_SchemeTable]


def read_schemes(file: Traversable) -> Mapping[str, Scheme]:
    """The schemes of a file. Raises WorkloadError if it has another form."""
    tables = validated(_SchemesTable, read_toml(file), file.name).scheme
    return {table.name: table.scheme() for table in tables}
