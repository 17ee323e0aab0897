"""Decode cases (model, scheme, batch, tokens) and the number of processes that measure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexq_bench.checkpoints import is_checkpoint
from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.checkpoint_weights import checkpoint_weights
from flexq_bench.decode.model_weights import open_weights
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.weights import SyntheticWeights, WeightSource
from flexq_bench.errors import UsageError
from flexq_bench.measure import Tuning
from flexq_bench.schemes.model_files import is_there
from flexq_bench.schemes.registry import resolve, without_cache
from kernels.decoder import KV_BITS
from workloads.models import load_catalog
from workloads.names import unknown

FULL_PRECISION = "fp16"  # the scheme under which a folder's own weights run

# 2: a decode is warmed up by its first tokens, not by all of them.
PROTOCOL_VERSION = 2
LONG_TOKENS = 512  # a decode of more new tokens is long: it has many steps by itself


@dataclass(frozen=True, slots=True)
class CachedScheme:
    """A scheme and the bits of its KV cache."""

    scheme: str
    kv_bits: int = 16


def read_scheme(text: str, kv_bits: int | None = None) -> CachedScheme:
    """`flexq-w6ax`, whose cache has kv_bits, or `flexq-w6ax+kv8`, which says itself.

    kv_bits None: the scheme's own. Raises UsageError for an unknown scheme and for other caches.
    """
    scheme, name = resolve(text), without_cache(text)
    if name != scheme.name or kv_bits is None:
        return CachedScheme(name, scheme.kv_bits)
    check_cache(kv_bits)
    return CachedScheme(name, kv_bits)


def check_cache(kv_bits: int) -> None:
    """Raise UsageError for a cache that there is none of."""
    if kv_bits not in KV_BITS:
        raise UsageError(f"a KV cache has 16, 8 or 4 bits, got {kv_bits}: give --kv-bits 8")


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

    device: as torch names it. checkpoints: folders of what `model` was quantized to, by scheme; of
    the schemes that are not among them `model` itself has the weights.
    """

    model: str
    schemes: tuple[CachedScheme, ...]
    device: str
    processes: int = 1
    long_processes: int = 1
    seed: int = 0
    tuning: Tuning = Tuning.REMEMBERED
    checkpoints: Mapping[str, str] = field(default_factory=dict)

    def weights_of(self, scheme: str) -> str:
        """Return the model or checkpoint folder that holds a scheme's weights: see open_model."""
        return self.checkpoints.get(scheme, self.model)

    def wanted(self, case: DecodeCase) -> int:
        """Return the number of processes that measure a case."""
        return self.long_processes if case.new_tokens > LONG_TOKENS else self.processes


def open_model(model: str, scheme: str, seed: int) -> WeightSource:
    """Weights of a quantized checkpoint as they are; of a folder or file in FP16.

    Of a catalog name, random ones of its shapes, rounded to nearest in the formats of the scheme.
    Raises UsageError if it is none of these, can't be read, or would have to be quantized first.
    """
    catalog = load_catalog()
    if model in catalog:
        dense = SyntheticWeights(of_catalog(catalog[model]), seed)
        return RoundedWeights(dense, resolve(scheme))
    path = Path(model)
    if not is_there(path) and "/" not in model and path.suffix != ".gguf":
        raise UsageError(f"{unknown('model', model, catalog)}; or give a folder or a .gguf file")
    if is_checkpoint(path):
        return checkpoint_weights(path)
    if resolve(scheme).name != FULL_PRECISION:
        raise UsageError(f"{model} is not quantized: quantize it by {scheme} first")
    return open_weights(path)
