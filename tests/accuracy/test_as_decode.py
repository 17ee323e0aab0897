"""Evaluation through kernels has the logits of decode, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flexq_bench.accuracy.as_decode import DecodedCache
from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.plan import EvaluationPlan
from flexq_bench.accuracy.results import KERNELS
from flexq_bench.accuracy.texts import read_text
from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.decode.loading import load
from flexq_bench.decode.text_decoder import MAX_LAUNCH_TOKENS
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.schemes import Calibration, resolve
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_files import model_at

CPU = torch.device("cpu")
VOCABULARY = 512  # of tiny-llama's tokenizer
# Every algorithm with a kernel; the calibration of those that learn is cut short.
SCHEMES = (
    *("flexq-w6ax", "w6a6", "w6a8", "w4a16", "w8a16", "gptq-w4a16", "awq-w4a16[steps=4]"),
    *("smoothquant-w8a8", "abq-w6a6[epochs=1]", "omniquant-w6a6[epochs=1]", "fp6", "fp5"),
    *("dgq-w4a8[group_steps=3,row_steps=3]", "dual-w6a8[row_steps=3]", "atom-w4a4"),
)
PROMPT, NEW = 9, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def a_llama():
    own = {"intermediate_size": 160, "num_key_value_heads": 2, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **own))


def an_opt():
    own = {"ffn_dim": 160, "word_embed_proj_dim": 64, "init_std": 0.2}
    return OPTForCausalLM(OPTConfig(**SIZES, **own))


def past_fp16():
    """A LLaMA whose hidden states are too large for FP16; its weights are not."""
    model = a_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e5
    return model


def a_qwen3():
    """Heads are wider than hidden / heads, and have norms that do something."""
    model = Qwen3ForCausalLM(Qwen3Config(**{**a_llama().config.to_diff_dict(), "head_dim": 32}))
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_norm.weight.normal_(1.0, 0.3)
    return model


BUILD: dict[str, Callable[[], Any]] = {
    "llama": a_llama,
    "opt": an_opt,
    "qwen3": a_qwen3,
    "past_fp16": past_fp16,
}


@dataclass(frozen=True)
class Stored:
    """The folder of a model, and the checkpoint that a scheme made of it."""

    original: Path
    checkpoint: QuantizedCheckpoint

    def model(self):
        return load_checkpoint(self.checkpoint, device=CPU, through=KERNELS).model

    def engine(self, texts, capacity):
        model = load(CheckpointWeights(self.checkpoint), CPU, 256, lambda *_: None, (1,))
        return Engine(
            model,
            TorchOperations(),
            lambda *_: None,
            slots=texts,
            capacity=capacity,
            kv_bits=self.checkpoint.kv_bits,
        )


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tiny_llama):
    @cache
    def original(kind):
        folder = tmp_path_factory.mktemp(f"original-{kind}")
        torch.manual_seed(0)
        BUILD[kind]().save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_llama / file, folder)
        return folder

    @cache
    def make(name, kind="llama", kv_bits=None):
        scheme, out = resolve(name), tmp_path_factory.mktemp("checkpoints") / "checkpoint"
        tokens = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(7))
        quantize_checkpoint(
            open_source(model_at(original(kind))),
            scheme,
            out,
            calibration=Calibration(tokens) if scheme.needs_calibration else None,
            device=CPU,
            dtype=torch.float32,
            kv_bits=kv_bits,
        )
        return Stored(original(kind), open_checkpoint(out))

    return make


def some_texts(rows, length=PROMPT):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


def generated(model, texts, new, **named):
    """Greedy tokens by transformers' own loop."""
    return model.generate(
        texts,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **{"attention_mask": torch.ones_like(texts), **named},
    )[:, texts.shape[1] :]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "llama") for name in SCHEMES), ("w6a6", "opt"), ("w8a16", "opt"), ("w6a6", "qwen3")],
)
def test_logits_and_greedy_tokens_equal_those_of_decode(stored, name, kind):
    made = stored(name, kind)
    model, engine, texts = made.model(), made.engine(2, PROMPT + NEW), some_texts(2)

    logits = model(input_ids=texts, use_cache=False).logits
    assert torch.equal(logits, engine.logits(texts.int()))
    cache = DecodedCache(capacity=PROMPT + NEW)
    tokens = generated(model, texts, NEW, past_key_values=cache)
    assert torch.equal(tokens, engine.generate(texts.int(), NEW).tokens)


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_quantized_cache_equals_that_of_decode(stored, kv_bits):
    made, plain = stored("w8a16", kv_bits=kv_bits), stored("w8a16")
    texts = some_texts(2)
    logits = made.model()(input_ids=texts).logits

    assert torch.equal(logits, made.engine(2, PROMPT).logits(texts.int()))
    assert not torch.equal(logits, plain.model()(input_ids=texts).logits)


def test_scheme_in_memory_equals_its_checkpoint(stored, tiny_llama):
    made = stored("w6a6")
    loaded = load_model(str(made.original), device=CPU)
    plan = EvaluationPlan(
        schemes=("w6a6",),
        texts=(read_text(str(tiny_llama / "heldout.txt")),),
        context=32,
        max_tokens=62,
        through=KERNELS,
    )
    model = Evaluator(loaded, plan, None).model_under("w6a6").model
    ids = some_texts(2)

    assert torch.equal(model(input_ids=ids).logits, made.model()(input_ids=ids).logits)


def test_padding_before_a_text_changes_nothing(stored):
    model, texts = stored("w8a16").model(), some_texts(2, 7)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), texts], dim=1)
    padded[1] = some_texts(1, 10)[0]
    mask = torch.ones_like(padded)
    mask[0, :3] = 0

    both = model(input_ids=padded, attention_mask=mask).logits
    alone = model(input_ids=texts[:1]).logits
    torch.testing.assert_close(both[0, 3:], alone[0], rtol=2e-3, atol=4e-3)
    tokens = generated(model, padded, 6, attention_mask=mask)
    assert torch.equal(tokens[0], generated(model, texts[:1], 6)[0])
    assert torch.equal(tokens[1], generated(model, padded[1:], 6)[0])


def test_text_longer_than_one_launch_has_equal_logits(stored, monkeypatch):
    model, texts = stored("w8a16").model(), some_texts(3, 40)
    whole = model(input_ids=texts).logits
    for most in (16, 100):  # a part of a text, two texts of three
        monkeypatch.setitem(MAX_LAUNCH_TOKENS, "cpu", most)
        torch.testing.assert_close(model(input_ids=texts).logits, whole, rtol=2e-3, atol=4e-3)


def test_cache_grows_and_is_continued(stored):
    model, texts = stored("w8a16").model(), some_texts(1, 20)
    cache = model(input_ids=texts[:, :5], use_cache=True).past_key_values
    logits = model(input_ids=texts[:, 5:], past_key_values=cache).logits

    assert cache.get_seq_length() == 20
    whole = model(input_ids=texts).logits[:, 5:]
    torch.testing.assert_close(logits, whole, rtol=2e-3, atol=4e-3)


def test_a_cache_of_another_model_is_refused(stored):
    ids = some_texts(1)
    with torch.no_grad():
        other = a_llama()(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(AccuracyError, match="was given the cache of another"):
        stored("w8a16").model()(input_ids=ids, past_key_values=other)


def test_hidden_states_beyond_fp16_are_refused(stored):
    model = stored("w8a16", "past_fp16").model()
    with pytest.raises(QuantizeError, match="predicts NaN or infinity: kernels take and give FP16"):
        model(input_ids=some_texts(1))


def test_modules_can_be_called_one_by_one(stored):
    """The layers keep their names, for comparing each with its kernel."""
    model, ids = stored("w8a16").model(), some_texts(1)
    layers = [m for m in model.modules() if isinstance(m, KernelLinear)]
    by_modules = type(model).forward(model, input_ids=ids, use_cache=False).logits

    assert len(layers) == 14
    assert (model(input_ids=ids).logits - by_modules).abs().max() < 0.02
