"""What is decoded: a model under a scheme, a batch, and how many tokens; and by how many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.checkpoints import open_checkpoint
from flexq_bench.decode.weights import SyntheticWeights, WeightSource
from flexq_bench.errors import UsageError
from flexq_bench.measure import Tuning
from flexq_bench.schemes.model_files import is_there
from kernels.decoder import KV_BITS
from workloads.models import load_catalog
from workloads.names import unknown
from workloads.schemes import get_scheme

# 2: a decode is warmed up by its first tokens, not by all of them.
PROTOCOL_VERSION = 2
LONG_TOKENS = 512  # a decode of more new tokens is long: it has many steps by itself
_WITH_CACHE = "+kv"


@dataclass(frozen=True, slots=True)
class CachedScheme:
    """A scheme and the bits of its KV cache."""

    scheme: str
    kv_bits: int = 16


def read_scheme(text: str, kv_bits: int) -> CachedScheme:
    """`flexq-w6ax`, whose cache has kv_bits, or `flexq-w6ax+kv8`, which says itself.

    Raises WorkloadError for an unknown scheme and UsageError for other caches.
    """
    name, says, width = text.partition(_WITH_CACHE)
    bits = width if says else str(kv_bits)
    if bits not in map(str, KV_BITS):
        raise UsageError(f"a KV cache has 16, 8 or 4 bits, got {bits}: write {name}{_WITH_CACHE}8")
    return CachedScheme(get_scheme(name).name, int(bits))


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
    def capacity(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def key(self) -> str:
        """Its identity within a run."""
        return (
            f"decode {self.model} {self.scheme} kv{self.kv_bits} b{self.batch} "
            f"p{self.prompt_tokens} n{self.new_tokens}"
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """processes: fresh ones that measure every case once each; long_processes: of long decodes.

    device: as torch names it.
    """

    model: str
    schemes: tuple[CachedScheme, ...]
    device: str
    processes: int = 1
    long_processes: int = 1
    seed: int = 0
    tuning: Tuning = Tuning.REMEMBERED

    def wanted(self, case: DecodeCase) -> int:
        """How many processes are to measure a case."""
        return self.long_processes if case.new_tokens > LONG_TOKENS else self.processes


def open_model(model: str, seed: int) -> WeightSource:
    """Weights of a folder or file; of a catalog name, random ones of its shapes.

    Raises UsageError if it is neither, or can't be read.
    """
    catalog = load_catalog()
    if model in catalog:
        return SyntheticWeights(of_catalog(catalog[model]), seed)
    path = Path(model)
    if not is_there(path) and "/" not in model and path.suffix != ".gguf":
        raise UsageError(f"{unknown('model', model, catalog)}; or give a folder or a .gguf file")
    return open_checkpoint(path)
