"""Whole small models on a CPU: FP16 as transformers computes it, quantized as their codes say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from decoders import (
    LIKE_LLAMA,
    SURE,
    WITH_EXPERTS,
    FakeQuantized,
    RoundedAlike,
    an_engine,
    prompts,
    small_experts,
    small_llama,
    small_opt,
    trained_llama,
)

from flexq_bench.decode.architecture import NotDecodedError
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import check_layers, load
from flexq_bench.decode.model_weights import open_weights
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")
TOLERANCE = 2e-2  # of logits
QUANTIZED_TOLERANCE = 3e-2
MODELS = Path(os.environ.get("FLEXQ_BENCH_MODELS", "no such folder"))


@pytest.fixture(scope="module", params=["llama", "opt"])
def small(request):
    return small_llama(CPU) if request.param == "llama" else small_opt(CPU)


@pytest.fixture(scope="module", params=["opt", *LIKE_LLAMA, *WITH_EXPERTS])
def of_each_kind(request):
    if request.param in WITH_EXPERTS:
        return small_experts(CPU, request.param)
    return small_opt(CPU) if request.param == "opt" else small_llama(CPU, request.param)


def test_fp16_logits_and_tokens_equal_transformers(of_each_kind):
    small = of_each_kind
    engine = an_engine(small, "fp16", TorchOperations())
    ids = prompts(2, 20, CPU)
    tokens = engine.generate(ids, 64).tokens
    with torch.inference_mode():
        wanted = small.reference(torch.cat([ids, tokens], dim=1).long()).logits.float()

    assert float((engine.logits(ids).float() - wanted[:, :20]).abs().max()) <= TOLERANCE
    of_tokens = wanted[:, 19:-1].gather(2, tokens[:, :, None])[:, :, 0]
    # A random model often has two tokens that are equally good but for rounding.
    assert float((wanted[:, 19:-1].amax(dim=2) - of_tokens).max()) <= 2 * TOLERANCE


@pytest.mark.parametrize(
    "scheme", ["flexq-w6ax", "smoothquant-w8a8", "fp6", "dgq-w4a8", "dual-w6a8", "atom-w4a4"]
)
def test_quantized_logits_equal_those_of_the_codes(small, scheme):
    ids = prompts(2, 10, CPU)
    got = an_engine(small, scheme, TorchOperations()).logits(ids)

    wanted = an_engine(small, scheme, TorchOperations(), instead=FakeQuantized).logits(ids)

    assert _apart(got, wanted) <= QUANTIZED_TOLERANCE


@pytest.mark.parametrize("scheme", ["dual-w6a8", "dgq-w4a8", "smoothquant-w8a8"])
def test_quantized_experts_have_the_logits_of_their_codes(scheme):
    small, ids = small_experts(CPU, norm_topk_prob=False), prompts(2, 10, CPU)
    got = an_engine(small, scheme, TorchOperations()).logits(ids)

    wanted = an_engine(small, scheme, TorchOperations(), instead=FakeQuantized).logits(ids)

    # The maximum is of tokens that one sum rounded another way sends to another expert.
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) <= 2e-2


def test_experts_without_a_grouped_kernel_are_not_decoded():
    source = RoundedWeights(small_experts(CPU).source, resolve("flexq-w6ax"))

    with pytest.raises(NotDecodedError, match="grouped kernels are dual-w6a8"):
        check_layers(source)


def test_a_wrong_sum_is_not_rounded_to():
    small, ids = small_llama(CPU), prompts(2, 10, CPU)

    class OneWrong(FakeQuantized):
        def gemm(self, x, w, out, **given):
            super().gemm(x, w, out, **given)
            if self.spec.activation.bits < 16:
                out[3, 5] += out[3, 5] * 2**-10 + 2**-24  # a unit in the last place

    made: list[RoundedAlike] = []

    def rounded_alike(kernel):
        made.append(RoundedAlike(OneWrong(kernel)))
        return made[-1]

    an_engine(small, "flexq-w6ax", TorchOperations(), instead=rounded_alike).logits(ids)

    assert [kernel.wrong for kernel in made] == [1] * 8 + [0]


def _apart(got, wanted):
    return float((got.float() - wanted.float()).abs().max())


def test_a_scheme_gives_each_layer_its_kernel(small):
    block = an_engine(small, "flexq-w6ax", TorchOperations()).model.blocks[0]
    labels = [part.kernel.spec.label for part in (block.qkv, block.out, block.widen, block.down)]

    is_opt = small.source.architecture.block == "opt"
    assert labels == ["flexq", "flexq", "flexq", "flexq" if is_opt else "flexq[w6a8]"]


def test_batch_equals_its_sequences_alone(small):
    engine = an_engine(small, "fp16", TorchOperations())
    ids = prompts(3, 9, CPU)
    together = engine.generate(ids, 20).tokens

    alone = [engine.generate(ids[i : i + 1], 20).tokens for i in range(3)]

    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("bits", [16, 4])
def test_steps_predict_what_a_prefill_predicts(small, bits):
    engine = an_engine(small, "fp16", TorchOperations(), kv_bits=bits)
    ids = prompts(2, 12, CPU)
    new = engine.generate(ids, 20).tokens

    logits = engine.logits(torch.cat([ids, new.int()], dim=1))[:, 11:-1].float()

    of_tokens = logits.gather(2, new[:, :, None])[:, :, 0]
    assert float((logits.amax(dim=2) - of_tokens).max()) <= 0.1


def test_llama_3_scales_low_rotary_frequencies():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    small = small_llama(CPU, rope_parameters=rope)
    ids = prompts(1, 100, CPU)
    with torch.inference_mode():
        wanted = small.reference(ids.long()).logits.float()

    got = an_engine(small, "fp16", TorchOperations()).logits(ids).float()

    assert float((got - wanted).abs().max()) <= TOLERANCE


def test_memory_of_tied_embeddings_is_counted_once():
    small = small_opt(CPU)
    model = an_engine(small, "fp16", TorchOperations()).model
    tensors = small.source.tensors
    stored = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    norms = sum(t.numel() for name, t in stored.items() if "norm" in name)

    assert model.nbytes == 2 * (sum(t.numel() for t in stored.values()) - norms)


def _real(name):
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"FLEXQ_BENCH_MODELS names no folder with {name}")
    return path


def _engine(source, capacity):
    model = load(source, CPU, capacity, lambda *_: None, (1,))
    return Engine(model, TorchOperations(), lambda *_: None, slots=1, capacity=capacity)


def test_64_tokens_of_a_trained_llama_equal_transformers():
    small = trained_llama(CPU)
    ids = torch.tensor([SURE], dtype=torch.int32)
    engine = an_engine(small, "fp16", TorchOperations())
    tokens = engine.generate(ids, 64).tokens
    whole = torch.cat([ids, tokens], dim=1)
    with torch.inference_mode():
        wanted = small.reference(whole.long()).logits.float()

    assert torch.equal(wanted[:, len(SURE) - 1 : -1].argmax(dim=-1), tokens)
    assert float((engine.logits(whole).float() - wanted).abs().max()) <= TOLERANCE


def test_stories_of_a_real_llama_equal_transformers():
    from transformers import AutoModelForCausalLM

    path = _real("stories260K")
    half, exact = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        for dtype in (torch.float16, torch.float32)
    )
    ids = torch.tensor([[1, 403, 407, 261, 378]], dtype=torch.int32)
    engine = _engine(open_weights(path), 80)
    tokens = engine.generate(ids, 64).tokens
    whole = torch.cat([ids, tokens], dim=1)
    with torch.inference_mode():
        theirs, wanted = (model(whole.long()).logits.float() for model in (half, exact))

    assert torch.equal(theirs[:, 4:-1].argmax(dim=-1), tokens)
    # Its logits reach 22, where FP16 has a unit of 1/64: ours are as near to FP32 as theirs are.
    ours = float((engine.logits(whole).float() - wanted).abs().max())
    assert ours <= max(TOLERANCE, 1.25 * float((theirs - wanted).abs().max()))


@pytest.mark.slow
def test_gguf_file_decodes_like_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    source = open_weights(_real("smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"))
    model = source.architecture.dimensions
    reference = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=model.hidden,
            intermediate_size=model.ffn,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            vocab_size=model.vocab,
            rms_norm_eps=source.architecture.eps,
            rope_parameters={"rope_type": "default", "rope_theta": source.architecture.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    names = [name for name in reference.state_dict() if name != "lm_head.weight"]  # it is tied
    reference.load_state_dict({name: source._tensor(name) for name in names}, strict=False)
    ids = torch.tensor([[1, 403, 407, 261, 378]], dtype=torch.int32)
    tokens = _engine(source, 80).generate(ids, 12).tokens
    with torch.inference_mode():
        wanted = reference(torch.cat([ids, tokens], dim=1).long()).logits

    assert torch.equal(wanted[:, 4:-1].argmax(dim=-1), tokens)
