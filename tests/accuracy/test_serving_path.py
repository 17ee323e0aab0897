"""Forced decoding through decode's engine: what is healthy passes, every damage is found."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "accuracy"))

from path_damage import DAMAGES, judged

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.parity import kernel_parity
from flexq_bench.accuracy.plan import EvaluationPlan
from flexq_bench.accuracy.serving_path import (
    IN_FP16,
    SHIPPED,
    Generations,
    PathPlan,
    greedy,
    loops,
    prompt_lengths,
    serving_path,
)
from flexq_bench.accuracy.texts import read_text
from flexq_bench.decode.engine import bucket_of
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")
PLAN = PathPlan(batches=(1, 3), steps=6, step_tokens=64)
LENGTH, NEW = 72, 12
END = frozenset([0])


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    return load_model(str(tiny_llama), device=CPU)


@pytest.fixture(scope="module")
def sequences(loaded, tiny_llama):
    ids = loaded.tokenizer((tiny_llama / "heldout.txt").read_text()[:4000])["input_ids"]
    return torch.tensor(ids[: 4 * LENGTH]).view(4, LENGTH)


@pytest.fixture(scope="module")
def under(loaded):
    def make(name):
        model, scheme = copy.deepcopy(loaded.model), resolve(name)
        scheme.quantize(model)
        quantize_cache(model, scheme.kv_bits)
        return model, scheme.kv_bits

    return make


@pytest.fixture(scope="module")
def run(sequences, under):
    def running(scheme, plan=PLAN):
        model, kv_bits = under(scheme)
        prompts = sequences[:2, :16]
        return serving_path(model, sequences, prompts, plan, kv_bits=kv_bits, new=NEW, ends=END)

    return running


@pytest.mark.parametrize("scheme", ["fp16", "w8a16", "w4a16+kv8", "rtn-w8a8", "w8a16+kv4"])
def test_healthy_path_differs_only_by_rounding(run, scheme):
    result = judged(run(scheme), [])
    assert not result["fails"], result


def test_every_way_batch_and_phase_is_compared(run):
    phases = run("w8a16").phases
    assert {(phase.way, phase.batch, phase.phase) for phase in phases} == {
        (way, batch, phase)
        for way in ("decode", "serve")
        for batch in PLAN.batches
        for phase in ("prompt", "step")
    }
    assert all(len(phase.kl) == len(phase.rounding) == len(phase.positions) for phase in phases)


def test_rounded_activations_also_run_with_weights_in_fp16(run):
    assert {phase.layers for phase in run("rtn-w8a8", PathPlan((2,), 4, 64)).phases} == {
        SHIPPED,
        IN_FP16,
    }
    assert {phase.layers for phase in run("w8a16", PathPlan((2,), 4, 64)).phases} == {SHIPPED}


def test_serving_has_sequences_of_unlike_lengths_at_once(run):
    served = next(p for p in run("w8a16").phases if p.name == "serve, batch 3, step")
    assert len(set(served.positions.tolist())) > 5


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "nothing"])
def test_every_damage_of_the_path_is_found(run, damage):
    with DAMAGES[damage](CPU, frozenset(["w8a16", "fp16"])):
        result = judged(run("w8a16"), [])
    assert result["fails"]
    assert result["picks"] or max(result["mean"], result["worst"]) > 20


@pytest.mark.parametrize("damage", ["softmax scale x 1.02 in steps", "norms x 1.01"])
def test_noise_of_rounded_activations_hides_no_damage_between_layers(run, damage):
    with DAMAGES[damage](CPU, frozenset()):
        result = judged(run("rtn-w8a8", PathPlan((2,), 4, 64)), [])
    assert result["fails"]
    assert result["mean_at"].startswith(IN_FP16)


def test_evaluated_through_kernels_has_the_same_path(loaded, sequences, tiny_llama):
    text = read_text(str(tiny_llama / "heldout.txt"))
    plan = EvaluationPlan(("w8a16",), texts=(text,), through="kernels", original=True)
    model = Evaluator(loaded, plan, None).model_under("w8a16").model
    result = serving_path(model, sequences, sequences[:2, :16], PLAN, kv_bits=16, new=NEW, ends=END)
    assert not judged(result, [])["fails"]


def test_continuations_are_those_of_transformers(loaded, run, sequences):
    own = run("fp16").generations
    assert own == greedy(loaded.model, sequences[:2, :16], NEW, END)


def test_short_sequences_have_fewer_steps(sequences, under):
    plan = PathPlan(batches=(2,), steps=12, step_tokens=64)
    model, bits = under("fp16")
    short = sequences[:, :16].contiguous()
    result = serving_path(model, short, short[:2, :8], plan, kv_bits=bits, new=4, ends=END)
    assert not judged(result, [])["fails"]
    with pytest.raises(AccuracyError, match="sequences of 16 tokens are needed"):
        serving_path(model, short[:, :15], short, plan, kv_bits=bits, new=4, ends=END)


def test_an_architecture_that_decode_lacks_is_named(sequences):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=512))
    with pytest.raises(AccuracyError, match="decode does not have GPT2LMHeadModel"):
        serving_path(model, sequences, sequences, PLAN, kv_bits=16, new=NEW, ends=END)


def test_prompts_cross_the_end_of_every_bucket():
    lengths = prompt_lengths(512, 12)
    reached = {bucket_of(n, 512) for first in lengths for n in range(first + 1, first + 12)}
    crossed = [n for n in lengths if bucket_of(n + 1, 512) != bucket_of(n + 11, 512)]
    assert reached == {bucket_of(n, 512) for n in range(1, 513)}
    assert len(crossed) == len(reached) - 1


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([1, 2, 3, 4] + [5, 6] * 4, True),
        ([1, 2] + [7] * 8, True),
        ([1, 2] + [7] * 6, False),
        (list(range(30)), False),
        ([5, 6] * 4 + [1], False),
        ([], False),
    ],
)
def test_a_loop_is_an_end_that_repeats(tokens, looping):
    assert loops(tokens) is looping


def test_agreement_counts_tokens_before_the_first_difference():
    ours = Generations(((1, 2, 3, 4), (5, 6)), (False, True))
    theirs = Generations(((1, 2, 9, 4), (5, 6)), (False, True))
    assert ours.agreement(theirs) == pytest.approx(0.75)
    assert ours.share_ended == 0.5
    assert ours.mean_length == 3


def test_parity_names_the_numbers_of_tokens_that_are_wrong(under, sequences):
    model, _ = under("w8a16")
    with DAMAGES["kernels at zero, 9 to 64 tokens"](CPU, frozenset(["w8a16"])):
        launches = list(kernel_parity(model, sequences[0]))
    wrong = {launch.m for launch in launches if launch.max_rel_error > 1e-3}
    assert wrong == {m for m in {launch.m for launch in launches} if 9 <= m <= 64}
