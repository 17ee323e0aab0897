"""A quantized checkpoint decodes to what torch computes from the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import VOCAB, Small, prompts, small_llama, small_opt

from flexq_bench.accuracy.quantized_cache import quantize_cache
from flexq_bench.checkpoints import QuantizedCheckpoint, open_checkpoint
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import load
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.weights import WeightSource
from flexq_bench.schemes import Calibration
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_files import model_at
from flexq_bench.schemes.model_map import replace_module
from flexq_bench.schemes.registry import named_schemes, resolve
from kernels.decoder.torch_operations import TorchOperations

CPU = torch.device("cpu")
IDS = prompts(2, 10, CPU)
BUILD: dict[str, Callable[[torch.device], Small]] = {"llama": small_llama, "opt": small_opt}
TRAINED = ("omniquant", "abq")
# Beside the examples of the registry: options that change the formats to those of a kernel.
ALSO = ("gptq-w4a16[symmetric=true]", "awq-w4a16[symmetric=true]", "atom-w4a4[activation_clip=1]")


def with_kernels() -> list[str]:
    names = [
        named.scheme.name
        for named in named_schemes()
        if all(layer.kernel for layer in (*named.gated, *named.plain))
    ]
    fast = [
        f"{name}[epochs=1]" if name.startswith(TRAINED) and "[" not in name else name
        for name in names
    ]
    return [name for name in (*fast, *ALSO) if name != "fp16"]


@dataclass(frozen=True)
class Stored:
    """A small model, and the checkpoint that a scheme made of it."""

    small: Small
    checkpoint: QuantizedCheckpoint


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Stored]:
    @cache
    def saved(kind: str) -> tuple[Small, Path]:
        small, folder = BUILD[kind](CPU), tmp_path_factory.mktemp(kind)
        small.reference.save_pretrained(folder)
        return small, folder

    @cache
    def make(kind: str, name: str) -> Stored:
        small, folder = saved(kind)
        scheme, out = resolve(name), tmp_path_factory.mktemp("checkpoints") / "checkpoint"
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(3, VOCAB, (2, 24), generator=generator)
        quantize_checkpoint(
            open_source(model_at(folder)),
            scheme,
            out,
            calibration=Calibration(tokens) if scheme.needs_calibration else None,
            device=CPU,
            dtype=torch.float32,
        )
        return Stored(small, open_checkpoint(out))

    return make


def logits(source: WeightSource, kv_bits: int = 16) -> torch.Tensor:
    model = load(source, CPU, 64, lambda *_: None, (2,))
    engine = Engine(
        model, TorchOperations(), lambda *_: None, slots=2, capacity=64, kv_bits=kv_bits
    )
    return engine.logits(IDS).float()


@torch.no_grad()
def reference_logits(stored: Stored, kv_bits: int = 16) -> torch.Tensor:
    """Transformers' FP16 forward pass with every quantized layer in plain torch."""
    import copy

    model: Any = copy.deepcopy(stored.small.reference)
    for name in stored.checkpoint.layers:
        replace_module(model, name, FakeQuantizedLinear(name, stored.checkpoint.layer(name)))
    tensors = {name: stored.checkpoint.tensor(name) for name in stored.checkpoint.tensor_names}
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    quantize_cache(model, kv_bits)
    return model(IDS.long(), use_cache=kv_bits < 16).logits.float()


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("name", with_kernels())
def test_logits_are_those_of_the_codes_in_torch(stored, kind: str, name: str) -> None:
    made = stored(kind, name)

    got = logits(CheckpointWeights(made.checkpoint))
    want = reference_logits(made)
    with torch.no_grad():
        dense = made.small.reference(IDS.long()).logits.float()
    print("XX", kind, name, rms(got - want), rms(want - dense), float((got-want).abs().max()))
