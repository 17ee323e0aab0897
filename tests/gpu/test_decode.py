"""Whole models on the GPU: FP16 as transformers computes it, quantized as their codes say."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from decoders import (
    SURE,
    WITH_EXPERTS,
    RoundedAlike,
    Small,
    an_engine,
    prompts,
    small_experts,
    small_llama,
    small_opt,
    tokens_without_graphs,
    trained_llama,
)

from flexq_bench.decode.requests import ServingRequest
from flexq_bench.decode.serving import serve
from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.torch_operations import TorchOperations

DEVICE = torch.device("cuda")
TOLERANCE = 2e-2  # of logits, FP16
QUANTIZED_TOLERANCE = 3e-2
SCHEMES = (
    "flexq-w6ax",
    "w6a8",
    "abq-w6a6",
    "smoothquant-w8a8",
    "w8a16",
    "w4a16",
    "fp6",
    "dgq-w4a8",
    "dual-w6a8",
    "atom-w4a4",
)


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_stays() -> Iterator[None]:
    """Loading a model collects garbage, which would look at all of it each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", params=["trained", "llama", "qwen3", "opt"])
def small(request: pytest.FixtureRequest) -> Small:
    if request.param == "trained":
        return trained_llama(DEVICE)
    return small_opt(DEVICE) if request.param == "opt" else small_llama(DEVICE, request.param)


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


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_fp16_experts_have_logits_and_tokens_of_transformers(kind: str) -> None:
    small, ids = small_experts(DEVICE, kind), prompts(3, 40, DEVICE)
    engine = an_engine(small, "fp16", CudaOperations())
    tokens = engine.generate(ids, 64).tokens
    with torch.inference_mode():
        wanted = small.reference(torch.cat([ids, tokens], dim=1).long()).logits.float()

    apart = (engine.logits(ids).float() - wanted[:, :40]).abs().amax(dim=2)
    of_tokens = wanted[:, 39:-1].gather(2, tokens[:, :, None])[:, :, 0]
    worse = wanted[:, 39:-1].amax(dim=2) - of_tokens
    # Few tokens have two experts with logits so alike that rounding decides between them.
    assert float((apart <= TOLERANCE).float().mean()) >= 0.97
    assert float((worse <= 2 * TOLERANCE).float().mean()) >= 0.97


@pytest.mark.parametrize("scheme", ["fp16", "dual-w6a8", "dgq-w4a8", "smoothquant-w8a8"])
def test_experts_have_logits_of_cpu_and_tokens_without_graphs(scheme: str) -> None:
    on_cpu, on_gpu = (small_experts(torch.device(device)) for device in ("cpu", "cuda"))
    engine = an_engine(on_gpu, scheme, CudaOperations())
    ids = prompts(3, 40, DEVICE)

    got = engine.logits(ids).float().cpu()
    wanted = an_engine(on_cpu, scheme, TorchOperations()).logits(ids.cpu()).float()

    # Few tokens are sent to another expert by one sum that is rounded another way.
    apart = (got - wanted).norm(dim=2) / wanted.norm(dim=2)
    assert float(apart.median()) <= 2e-2
    assert float((apart <= 5e-2).float().mean()) >= 0.9
    for batch in (1, 3):
        tokens = engine.generate(ids[:batch], 40).tokens
        assert torch.equal(tokens, tokens_without_graphs(engine, ids[:batch], 40))


def test_64_tokens_of_a_trained_llama_equal_transformers() -> None:
    small = trained_llama(DEVICE)
    ids = torch.tensor([SURE], dtype=torch.int32, device=DEVICE)
    tokens = an_engine(small, "fp16", CudaOperations()).generate(ids, 64).tokens
    with torch.inference_mode():
        logits = small.reference(torch.cat([ids, tokens], dim=1).long()).logits

    assert torch.equal(logits[:, len(SURE) - 1 : -1].argmax(dim=-1), tokens)


# Tokens enough for the kernels of prompts, and few enough for those of steps.
@pytest.mark.parametrize("shape", [(3, 100), (5, 80), (2, 8)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_logits_equal_those_of_rounded_weights(
    small: Small, scheme: str, shape: tuple[int, int]
) -> None:
    ids = prompts(*shape, DEVICE)
    made: list[RoundedAlike] = []

    def rounded_alike(kernel: LinearKernel) -> LinearKernel:
        made.append(RoundedAlike(kernel))
        return made[-1]

    def logits(instead: Callable[[LinearKernel], LinearKernel]) -> torch.Tensor:
        engine = an_engine(small, scheme, CudaOperations(), slots=shape[0], instead=instead)
        return engine.logits(ids).float()

    got, wanted = logits(lambda kernel: kernel), logits(rounded_alike)

    assert float((got - wanted).abs().max()) <= QUANTIZED_TOLERANCE
    assert _agree(got.argmax(dim=-1), wanted.argmax(dim=-1)) >= 0.99
    assert sum(kernel.wrong for kernel in made) == 0


@pytest.mark.parametrize(
    ("scheme", "bits"), [*((scheme, 16) for scheme in SCHEMES), ("flexq-w6ax", 8), ("w8a16", 4)]
)
def test_step_tokens_equal_those_of_rounded_weights(small: Small, scheme: str, bits: int) -> None:
    ids = prompts(3, 20, DEVICE)
    by_graphs = an_engine(small, scheme, CudaOperations(), kv_bits=bits).generate(ids, 12).tokens

    wanted = an_engine(small, scheme, CudaOperations(), kv_bits=bits, instead=RoundedAlike)

    assert torch.equal(by_graphs, tokens_without_graphs(wanted, ids, 12))


@pytest.mark.parametrize("scheme", ["fp16", "flexq-w6ax"])
def test_a_batch_decodes_what_each_sequence_decodes_alone(small: Small, scheme: str) -> None:
    engine = an_engine(small, scheme, CudaOperations())
    ids = prompts(3, 20, DEVICE)
    together = engine.generate(ids, 40).tokens

    for i, new in enumerate(together):
        alone = engine.generate(ids[i : i + 1], 40).tokens[0]
        differing = torch.nonzero(new != alone).flatten()
        if not len(differing):
            continue
        # GEMMs of other sizes may add up in another order: of equally good tokens any may come.
        first = int(differing[0])
        read = torch.cat([ids[i], new[:first].int()])[None]
        likeliest = engine.logits(read)[0, -1].float()
        apart = likeliest[new[first]] - likeliest[alone[first]]
        assert abs(float(apart)) <= 2 * TOLERANCE, first


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_steps_equal_a_prompt_of_the_same_tokens(small: Small, bits: int) -> None:
    engine = an_engine(small, "fp16", CudaOperations(), kv_bits=bits)
    ids = prompts(2, 20, DEVICE)
    new = engine.generate(ids, 30).tokens

    logits = engine.logits(torch.cat([ids, new.int()], dim=1))

    assert _agree(logits[:, 19:-1].argmax(dim=-1), new) >= 0.95


@pytest.mark.parametrize("scheme", SCHEMES)
def test_graph_decode_equals_prompt_of_every_scheme(scheme: str) -> None:
    engine = an_engine(trained_llama(DEVICE), scheme, CudaOperations())
    ids = prompts(3, 20, DEVICE)
    new = engine.generate(ids, 12).tokens

    logits = engine.logits(torch.cat([ids, new.int()], dim=1))[:, 19:-1].float()

    of_tokens = logits.gather(2, new[:, :, None])[:, :, 0]
    # A code that falls the other way moves logits by more than rounding does.
    assert float((logits.amax(dim=2) - of_tokens).max()) <= 0.25


@pytest.mark.parametrize(("step_tokens", "bits"), [(256, 16), (64, 16), (16, 8)])
def test_served_requests_get_the_same_tokens_as_alone(step_tokens: int, bits: int) -> None:
    engine = an_engine(trained_llama(DEVICE), "fp16", CudaOperations(), kv_bits=bits)
    lengths = [(9, 12), (70, 3), (5, 1), (34, 20), (100, 9), (3, 5), (40, 30)]
    ids = prompts(len(lengths), 100, DEVICE)

    served = serve(engine, [ServingRequest(*pair) for pair in lengths], ids, step_tokens)

    for i, (prompt, new) in enumerate(lengths):
        answer = served.answers[i]
        whole = torch.cat([ids[i, :prompt], answer.int()])[None]
        logits = engine.logits(whole)[0, prompt - 1 : -1].float()
        assert answer.shape == (new,)
        # GEMMs of other sizes may add up in another order: of equally good tokens any may come.
        of_tokens = logits.gather(1, answer[:, None])[:, 0]
        assert float((logits.amax(dim=1) - of_tokens).max()) <= 2 * TOLERANCE


def _agree(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).float().mean())
