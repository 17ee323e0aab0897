"""What is decoded: a model under a scheme, a batch, and how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.checkpoints import open_checkpoint
from flexq_bench.decode.weights import SyntheticWeights, WeightSource
from flexq_bench.errors import UsageError
from workloads.models import load_catalog
from workloads.names import unknown

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """model: of the catalog, a folder or a .gguf file. kv_bits: of the cache."""

    model: str
    scheme: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    kv_bits: int = 16

    @property
    def key(self) -> str:
        """Its identity within a run."""
        return (
            f"decode {self.model} {self.scheme} kv{self.kv_bits} b{self.batch} "
            f"p{self.prompt_tokens} n{self.new_tokens}"
        )


def open_model(model: str, seed: int) -> WeightSource:
    """Weights of a folder or file; of a catalog name, random ones of its shapes.

    Raises UsageError if it is neither, or can't be read.
    """
    catalog = load_catalog()
    if model in catalog:
        return SyntheticWeights(of_catalog(catalog[model]), seed)
    path = Path(model)
    if not path.exists() and "/" not in model and path.suffix != ".gguf":
        raise UsageError(f"{unknown('model', model, catalog)}; or give a folder or a .gguf file")
    return open_checkpoint(path)
