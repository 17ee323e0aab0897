"""The verb `sensitivity` on the tiny model that comes with the project."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.sensitivity.layer_kinds import ALL_KINDS, Bits, kind_sensitivities
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.schemes.registry import resolve

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
DATA = TINY / "heldout.txt"
CALIBRATION = TINY / "calibration.txt"
BUDGET = ("--a8-budget", "0.25")
KINDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all"]


@pytest.fixture(scope="module")
def tiny():
    """The loaded model and its text's tokens."""
    loaded = load_model(str(TINY), device=torch.device("cpu"))
    return loaded.model, tokenize(read_text(str(DATA)), loaded.tokenizer)


@pytest.fixture
def sensitivity(cli):
    """sensitivity("--bits", "w4a4"): the verb on tiny-llama and its held-out text."""
    return partial(cli, "sensitivity", "--model", str(TINY), "--data", str(DATA))


def test_all_kinds_equal_the_scheme_and_the_model_is_restored(tiny):
    model, tokens = tiny
    before = perplexity(model, tokens, context=128, max_tokens=508)

    dense, found = kind_sensitivities(model, tokens, [Bits(4, 4)], context=128, max_tokens=508)

    assert dense.nll == before.nll == perplexity(model, tokens, context=128, max_tokens=508).nll
    assert [sensitivity.kind for sensitivity in found] == KINDS
    quantized = load_model(str(TINY), device=torch.device("cpu")).model
    resolve("w4a4").quantize(quantized)
    whole = perplexity(quantized, tokens, context=128, max_tokens=508)
    assert found[-1].kind == ALL_KINDS
    assert found[-1].result.nll == whole.nll


def test_a_kind_loses_less_than_all_together(tiny):
    model, tokens = tiny

    _, found = kind_sensitivities(model, tokens, [Bits(3, 3)], context=128, max_tokens=508)

    assert (
        max(sensitivity.result.mean_nll for sensitivity in found[:-1]) < found[-1].result.mean_nll
    )
    assert all(d.increase.low <= d.increase.estimate <= d.increase.high for d in found)


def test_the_verb_writes_json_and_a_figure(sensitivity, tmp_path):
    figure = tmp_path / "figure.png"

    ran = sensitivity(
        *("--max-tokens", "510", "--bits", "w4a4", "--a8-budget", "0.25", "--json"),
        *("--a8-cost", "matrices,layers", "--calibration", str(CALIBRATION)),
        *("--calibration-segments", "2", "--figure", str(figure)),
    )

    document = json.loads(ran.out, parse_constant=pytest.fail)
    assert ran.code == 0
    assert [row["kind"] for row in document["kinds"]] == KINDS
    names = [choice["name"] for choice in document["choices"]]
    assert names == ["W6A6", "W6A8", "paper", "0.25 of layers", "0.25 of matrices"]
    assert document["choices"][3]["layers"] <= 0.25
    assert document["choices"][4]["matrices"] <= 0.25
    assert len(document["sites"]) == 28
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_verb_prints_tables_for_people(sensitivity):
    ran = sensitivity(
        *("--max-tokens", "510", "--bits", "w4a4", "--a8-budget", "0.25"),
        *("--calibration", str(CALIBRATION), "--calibration-segments", "1"),
    )

    assert ran.code == 0
    assert all(word in ran.out for word in (*KINDS, "gap closed", "gains most from 8 bits"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BUDGET, "give --calibration"),
        (("--bits", "w6"), "--bits w6: write w6a6"),
        (("--a8-cost", "money"), "no cost named 'money': there are layers"),
        (("--model", "nowhere"), "no model nowhere"),
        (("--data", "nowhere.txt"), "no text nowhere.txt"),
        (
            (*BUDGET, "--calibration", str(CALIBRATION), "--calibration-segments", "999"),
            "calibration needs 999 segments",
        ),
        ((*BUDGET, "--calibration", str(DATA)), "choose layers on another one"),
        (("--a8-budget", "1.5", "--calibration", str(CALIBRATION)), "--a8-budget"),
        (("--figure", "no/such/folder/x.png"), "there is no folder"),
    ],
)
def test_invalid_options_are_refused_in_one_line(sensitivity, options, words):
    ran = sensitivity("--max-tokens", "255", "--bits", "w6a6", *options)

    assert (ran.code, ran.out) == (2, "")
    assert len(ran.error.splitlines()) == 1
    assert words in ran.error
