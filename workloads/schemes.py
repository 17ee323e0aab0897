"""Schemes: how a model is quantized, as the kernel of each of its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from workloads.errors import WorkloadError
from workloads.models import Block
from workloads.names import unknown
from workloads.tomlfile import Table, read_toml

_BLOCK_LAYERS: dict[Block, tuple[str, ...]] = {
    "llama": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "opt": ("qkv_proj", "out_proj", "fc1", "fc2"),
}
_KEYS = ("name", "summary", "source", "kernel", *_BLOCK_LAYERS)


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
        return tuple(dict.fromkeys(self.kernel_of(block, name) for name in _BLOCK_LAYERS[block]))


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


def read_schemes(file: Traversable) -> Mapping[str, Scheme]:
    """The schemes of a file. Raises WorkloadError if it has another form."""
    top = Table(read_toml(file), file.name, ("scheme",))
    schemes = [_read_scheme(values, file.name) for values in top.tables("scheme")]
    return {scheme.name: scheme for scheme in schemes}


def _read_scheme(values: dict[str, Any], file: str) -> Scheme:
    where = f"{file}, {values.get('name', 'a scheme')}"
    table = Table(values, where, _KEYS)
    exceptions: dict[Block, Mapping[str, str]] = {}
    for block, layers in _BLOCK_LAYERS.items():
        if block in table:
            of_block = Table(values[block], f"{where}, {block}", layers)
            exceptions[block] = {name: of_block.text(name) for name in layers if name in of_block}
    return Scheme(
        table.text("name"),
        table.text("summary"),
        table.text("source"),
        table.text("kernel"),
        exceptions,
    )
