"""Whole models on the GPU: FP16 as transformers computes it, quantized as their codes say."""

from __future__ import annotations

import pytest
import torch
from decoders import Small, an_engine, prompts, small_llama, small_opt

from kernels.decoder.cuda_operations import CudaOperations

DEVICE = torch.device("cuda")
TOLERANCE = 2e-2  # of logits
QUANTIZED = (
    "flexq-w6ax",
    "flexq-w6a8",
    "smoothquant-w8a8",
    "abq-w6a6",
    "w8a16",
    "w4a16",
    "fp6-w6a16",
    "dgq-w4a8",
    "atom-w4a4",
)


@pytest.fixture(scope="module", params=["llama", "llama-mha", "opt"])
def small(request: pytest.FixtureRequest) -> Small:
    if request.param == "opt":
        return small_opt(DEVICE)
    if request.param == "llama":
        return small_llama(DEVICE)
    sizes = {
        "initializer_range": 0.04,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 4,
    }
    return small_llama(DEVICE, num_key_value_heads=4, num_hidden_layers=4, **sizes)


def test_fp16_logits_and_tokens_are_those_of_transformers(small: Small) -> None:
    engine = an_engine(small, "fp16", CudaOperations())
    ids = prompts(3, 40, DEVICE)
    tokens = engine.generate(ids, 64).tokens
    with torch.inference_mode():
        wanted = small.reference(torch.cat([ids, tokens], dim=1).long()).logits.float()

    assert float((engine.logits(ids).float() - wanted[:, :40]).abs().max()) <= TOLERANCE
    of_tokens = wanted[:, 39:-1].gather(2, tokens[:, :, None])[:, :, 0]
    # A random model often has two tokens that are equally good but for rounding.
    assert float((wanted[:, 39:-1].amax(dim=2) - of_tokens).max()) <= 2 * TOLERANCE


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_logits_are_those_of_the_codes(small: Small, scheme: str) -> None:
    ids = prompts(3, 100, DEVICE)
    got = an_engine(small, scheme, CudaOperations()).logits(ids).float()
    wanted = an_engine(small, scheme, CudaOperations(), fake=True).logits(ids).float()
    exact = an_engine(small, "fp16", CudaOperations()).logits(ids).float()

    # A value that FP16 rounds the other way may get the next code, so that differences are not
    # those of rounding alone; they stay far below what quantization itself changes.
    damage = (wanted - exact).square().mean().sqrt()
    assert float((got - wanted).square().mean().sqrt()) <= 0.35 * float(damage) + 2e-3


@pytest.mark.parametrize("scheme", ["fp16", "flexq-w6ax"])
def test_a_batch_decodes_what_each_sequence_decodes_alone(small: Small, scheme: str) -> None:
    engine = an_engine(small, scheme, CudaOperations())
    ids = prompts(3, 20, DEVICE)
    together = engine.generate(ids, 40).tokens

    alone = torch.cat([engine.generate(ids[i : i + 1], 40).tokens for i in range(3)])

    assert torch.equal(together, alone)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_steps_decode_what_a_prompt_of_the_same_tokens_says(small: Small, bits: int) -> None:
    engine = an_engine(small, "fp16", CudaOperations(), kv_bits=bits)
    ids = prompts(2, 20, DEVICE)
    new = engine.generate(ids, 30).tokens

    logits = engine.logits(torch.cat([ids, new.int()], dim=1))

    assert _agree(logits[:, 19:-1].argmax(dim=-1), new) >= 0.95


def _agree(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).float().mean())
