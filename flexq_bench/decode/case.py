"""Decode cases (model, scheme, batch, tokens) and the number of processes that measure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.architecture import NotDecodedError, of_catalog
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.loading import check_layers
from flexq_bench.decode.model_weights import open_weights
from flexq_bench.decode.modules import ModuleWeights
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.weights import SyntheticWeights, WeightSource
from flexq_bench.errors import UsageError
from flexq_bench.kernels.decoder import KV_BITS
from flexq_bench.measure import Tuning
from flexq_bench.measure.device import devices_from
from flexq_bench.schemes.model_files import is_there, model_at
from flexq_bench.schemes.registry import resolve, without_cache
from flexq_bench.workloads.models import load_catalog
from flexq_bench.workloads.names import unknown

FULL_PRECISION = "fp16"  # the scheme of unquantized weights

# 2: the warm-up decodes only the first tokens instead of all.
PROTOCOL_VERSION = 2
MIN_LONG_TOKENS = 512  # with more new tokens, a decode has enough steps for fewer processes


@dataclass(frozen=True, slots=True)
class CachedScheme:
    """A scheme and the bits of its KV cache."""

    scheme: str
    kv_bits: int = 16


def read_scheme(text: str, kv_bits: int | None = None) -> CachedScheme:
    """Parse `flexq-w6ax`, with a cache of kv_bits, or `flexq-w6ax+kv8`, with its own bits.

    kv_bits None: the scheme's default. Raises UsageError for an unknown scheme or invalid bits.
    """
    scheme, name = resolve(text), without_cache(text)
    if name != scheme.name or kv_bits is None:
        return CachedScheme(name, scheme.kv_bits)
    check_cache(kv_bits)
    return CachedScheme(name, kv_bits)


def check_cache(kv_bits: int) -> None:
    """Raise UsageError for an unsupported width of the KV cache."""
    if kv_bits not in KV_BITS:
        raise UsageError(f"a KV cache has 16, 8 or 4 bits, got {kv_bits}: give --kv-bits 8")


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """A case to decode. model: a catalog name, a folder or a .gguf file. kv_bits: of the cache."""

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
        """The key within a run."""
        return (
            f"decode {self.model} {self.scheme} kv{self.kv_bits} b{self.batch} "
            f"p{self.prompt_tokens} n{self.new_tokens}"
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """Common settings of cases.

    processes: number of fresh processes, each of which measures every case once; long_processes:
    the same for long decodes. device: as named by torch; gpus: number of devices from it on, which
    share every layer. checkpoints: folders of quantized checkpoints of `model`, by scheme; other
    schemes use the weights of `model` itself. invariant: logits do not depend on the batch. brief:
    without energy and the parts of a step.
    """

    model: str
    schemes: tuple[CachedScheme, ...]
    device: str
    processes: int = 1
    long_processes: int = 1
    seed: int = 0
    tuning: Tuning = Tuning.REMEMBERED
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    invariant: bool = False
    brief: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all devices."""
        return devices_from(self.device, self.gpus)

    def weights_of(self, scheme: str) -> str:
        """The model or checkpoint folder with a scheme's weights; see open_model.

        A path is absolute, because workers run in another folder.
        """
        model = self.checkpoints.get(scheme, self.model)
        return model if model in load_catalog() else str(Path(model).absolute())

    def process_count(self, case: DecodeCase) -> int:
        """The number of processes that measure a case."""
        return self.long_processes if case.new_tokens > MIN_LONG_TOKENS else self.processes


def open_decodable(model: str, scheme: str, seed: int) -> WeightSource | ModuleWeights:
    """Open as open_model; for transformers' modules if decode has no own forward pass for it."""
    try:
        source = open_model(model, scheme, seed)
        check_layers(source)
        return source
    except NotDecodedError:
        if model in load_catalog():
            raise
        if is_checkpoint(Path(model)):
            return ModuleWeights(open_checkpoint(Path(model)))
        files = model_at(Path(model))
        if files.gguf is not None:
            raise
        return ModuleWeights(files)


def open_model(model: str, scheme: str, seed: int) -> WeightSource:
    """Open the weights of a quantized checkpoint, or FP16 weights of a folder or file.

    For a catalog name: random weights of its shapes, rounded to nearest in the scheme's formats.
    Raises UsageError if it is none of these, can't be read, or must be quantized first.
    """
    catalog = load_catalog()
    if model in catalog:
        dense = SyntheticWeights(of_catalog(catalog[model]), seed)
        return RoundedWeights(dense, resolve(scheme))
    path = Path(model)
    if not is_there(path) and "/" not in model and path.suffix != ".gguf":
        raise UsageError(f"{unknown('model', model, catalog)}; or give a folder or a .gguf file")
    if is_checkpoint(path):
        return CheckpointWeights(open_checkpoint(path))
    if resolve(scheme).name != FULL_PRECISION:
        raise UsageError(f"{model} is not quantized: quantize it by {scheme} first")
    return open_weights(path)
