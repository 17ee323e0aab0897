"""Logits of a sequence are the same bits in any batch and in any chunks of its prompt."""

from __future__ import annotations

import pytest
import torch
from decoders import an_engine, prompts, small_llama

from flexq_bench.decode.decoder import Chunks
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.invariance import invariant_kernel, sha256_of
from flexq_bench.decode.loading import load
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.errors import UsageError
from flexq_bench.kernels.decoder.invariant import InvariantOperations
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")
LENGTH = 14


def engine_of(scheme, slots, kind="llama"):
    source = RoundedWeights(small_llama(CPU, kind).source, resolve(scheme))
    model = load(source, CPU, 32, lambda *_: None, (slots,), find=invariant_kernel)
    return Engine(model, InvariantOperations(), lambda *_: None, slots=slots, capacity=32)


def logits_of(scheme, ids, chunk, kind="llama"):
    """Logits after each chunk's end and of two further steps, for prompts [B, T]."""
    batch, length = ids.shape
    engine = engine_of(scheme, batch, kind)
    slots = torch.arange(batch)
    for start in range(0, length, chunk):
        part = ids[:, start : start + chunk]
        begin, count = torch.full_like(slots, start), torch.full_like(slots, part.shape[1])
        logits = engine.read(Chunks(part, begin, count, slots, start + part.shape[1]), batch)
    steps = [logits.clone()]
    for step in range(2):
        steps.append(engine.advance(batch, engine.bucket(length + step + 1)).clone())
    return torch.stack(steps, dim=1)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [("dual-w6a8", "llama"), ("smoothquant-w8a8", "qwen2"), ("dual-w6a8", "qwen3")],
)
def test_logits_are_those_of_any_batch_and_chunks(scheme, kind):
    ids = prompts(5, LENGTH, CPU)
    together = logits_of(scheme, ids, LENGTH, kind)

    for rows, chunk in ((slice(0, 1), LENGTH), (slice(2, 4), 5), (slice(1, 5), 1)):
        assert torch.equal(logits_of(scheme, ids[rows], chunk, kind), together[rows])


def test_logits_are_those_of_the_usual_operators():
    ids = prompts(2, LENGTH, CPU)
    usual = an_engine(small_llama(CPU), "dual-w6a8", TorchOperations()).logits(ids)

    logits = engine_of("dual-w6a8", 2).logits(ids)

    assert float((logits.float() - usual.float()).abs().max()) <= 0.3
    assert float((logits.float() - usual.float()).abs().mean()) <= 0.03


def test_layers_that_add_rounded_products_are_refused():
    source = RoundedWeights(small_llama(CPU).source, resolve("flexq-w6ax"))

    with pytest.raises(UsageError, match="adds rounded products"):
        load(source, CPU, 32, lambda *_: None, (1,), find=invariant_kernel)


def test_a_hash_is_of_every_bit():
    logits = torch.zeros(2, 3, dtype=torch.float16)
    other = logits.clone()
    other[1, 2] = 2**-24

    assert sha256_of(logits) == sha256_of(logits.clone())
    assert sha256_of(logits) != sha256_of(other)
