"""The benchmark of the gate's errors: what it varies where models are equal."""

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


def test_equal_models_compute_other_numbers_of_segments_together(
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
    options = Namespace(
        model=str(tiny_llama), data=str(tiny_llama / "heldout.txt"), policy="default",
        context=64, max_tokens=2520, device="cpu",
    )  # fmt: skip
    bench = gate_errors.Bench(options, gate_errors.judged_policy(options))

    with closing(bench):
        codes = gate_errors.equal_models(bench, 3)

    assert codes == {str(int(ExitCode.PASS)): 3}
    assert set(together) >= {1, 2, 3}
