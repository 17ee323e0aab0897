"""The benchmarks of the gate: what they vary where models are equal, what they call wrong."""

from __future__ import annotations

import importlib
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import pytest

from flexq_bench.exit_codes import ExitCode

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accuracy"


@pytest.fixture
def gate_errors(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gate_errors")


def options_of(tiny_llama, **given):
    common = {"data": [str(tiny_llama / "heldout.txt")], "device": "cpu", "texts": "heldout"}
    return Namespace(model=str(tiny_llama), **common, **given)


@pytest.mark.slow
def test_equal_models_pass_with_any_number_of_segments_together(
    tiny_llama, gate_errors, monkeypatch
):
    together = []

    def permute(model, seed, permuted=gate_errors.permute_channels):
        before = model.model.layers[0].mlp.up_proj.weight.clone()
        permuted(model, seed)
        assert not before.equal(model.model.layers[0].mlp.up_proj.weight)
        model.model.embed_tokens.register_forward_hook(
            lambda _, __, hidden: together.append(len(hidden))
        )

    monkeypatch.setattr(gate_errors, "permute_channels", permute)
    options = options_of(tiny_llama, policy="default", context=64, max_tokens=3780)
    bench = gate_errors.Bench(options, gate_errors.judged_policy(options))

    with closing(bench):
        codes = gate_errors.equal_models(bench, range(3))

    assert codes == {str(int(ExitCode.PASS)): 3}
    assert set(together) >= {1, 2, 3}


def test_one_stale_token_of_a_thousand_fails(tiny_llama, gate_errors):
    damages = importlib.import_module("damages")
    (stale,) = (damage for damage in damages.WALL if damage.name == "stale tokens")
    policy = str(tiny_llama / "policy.toml")
    options = options_of(tiny_llama, policy=policy, context=None, max_tokens=None)

    with closing(gate_errors.Bench(options, gate_errors.judged_policy(options))) as bench:
        report, _ = bench.judge(stale, 1000, "fp16")

    assert report.exit_code == ExitCode.REGRESSION


CLEAN = ["perplexity", "KL mean"]  # what a scheme fails that a policy refuses


@pytest.mark.parametrize(
    ("corruption", "scheme", "fails", "must", "wrong"),
    [
        ("none", "fp16", [], False, False),
        ("none", "fp16", ["KL mean"], False, True),
        ("none", "flexq-w6ax", CLEAN, False, False),
        ("none", "flexq-w6ax", [*CLEAN, "fidelity of KL"], False, True),
        ("sign", "flexq-w6ax", [*CLEAN, "fidelity of KL"], True, False),
        ("sign", "flexq-w6ax", CLEAN, True, True),  # which it fails without the damage, too
        ("cache", "flexq-w6ax+kv8", CLEAN, True, True),
        ("sign", "fp16", ["perplexity"], True, False),
        ("sign", "fp16", [], False, False),
    ],
)
def test_scheme_that_fails_undamaged_does_not_count_as_caught(
    gate_errors, corruption, scheme, fails, must, wrong
):
    verdicts = importlib.import_module("corruption_table").Verdicts()
    rows = [
        {"corruption": "none", "scheme": name, "fails": failing, "kl": 0.1, "must_be_caught": False}
        for name, failing in (("fp16", []), ("flexq-w6ax", CLEAN))
    ]
    assert not any(verdicts.is_wrong(row) for row in rows)
    row = {"corruption": corruption, "scheme": scheme, "fails": fails, "kl": 0.2}
    assert verdicts.is_wrong(row | {"must_be_caught": must}) == wrong


def test_change_of_a_text_is_of_segments_both_have(gate_errors):
    corruptions = importlib.import_module("corruptions")
    undamaged = corruptions.Undamaged({"a": [2.0, 3.0], "b": [2.0]}, frozenset())
    changes = undamaged.changes({"a": [2.01, 3.01, 9.0], "b": []})
    assert changes["a"] == pytest.approx(1.005, abs=1e-3)
    assert changes["b"] > 1e6  # a model without a loss on a text
    assert undamaged.changes({}) == {}
