"""Choosing configurations inside a step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from decoders import small_llama

from flexq_bench.decode import tuning
from flexq_bench.decode.loading import load
from flexq_bench.decode.tuning import StepTuner, step_us
from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.measure.tuning import Tuning

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Choice(Config):
    """A configuration that does nothing."""

    number: int


CHOICES = [Choice(number) for number in range(4)]


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A small model whose linear layers have a choice."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    source = small_llama(CPU).source
    loaded = load(source, CPU, 64, lambda *_: None, (1,))
    kernel = type(loaded.blocks[0].qkv.kernel)
    monkeypatch.setattr(kernel, "candidates", lambda *_: CHOICES)
    monkeypatch.setattr(kernel, "default_config", lambda *_: CHOICES[0])
    return loaded


@pytest.fixture
def timed(model, monkeypatch):
    """The choices of each step that was timed: of widen, down, qkv and out."""
    seen: list[tuple[Config | None, ...]] = []

    def fake(some, operations, choose, m, samples):
        block = some.blocks[0]
        linears = (block.widen, block.down, block.qkv, block.out)
        of = [choose(li.kernel, m, li.weights.rows, li.weights.k) for li in linears]
        seen.append(tuple(of))
        widen, down = (config.number for config in of[:2])
        if down == 3:
            raise RuntimeError("it doesn't run")
        # Of down what is fastest depends on what stands before it.
        return 10.0 - 3.0 * (widen == 2) - (down == (1 if widen == 2 else 2))

    monkeypatch.setattr(tuning, "step_us", fake)
    return seen


def chosen(tuner, model, m):
    block = model.blocks[0]
    found = [
        tuner(li.kernel, m, li.weights.rows, li.weights.k)
        for li in (block.widen, block.down, block.qkv, block.out)
    ]
    return [config.number for config in found if isinstance(config, Choice)]


def test_each_layer_is_tuned_with_earlier_choices(model, timed):
    tuner = StepTuner(CPU, TorchOperations(), Tuning.REMEMBERED, frozenset((1,)))
    assert chosen(tuner, model, 1) == [0, 0, 0, 0]

    tuner.tune(model)

    assert chosen(tuner, model, 1) == [2, 1, 0, 0]
    configs = tuner.configs(model, 1)
    assert (configs["gate_up_proj"], configs["down_proj"]) == ({"number": 2}, {"number": 1})
    assert chosen(tuner, model, 7) == [0, 0, 0, 0]  # nobody requested for 7 tokens


def test_near_candidates_are_timed_again_for_longer(model, monkeypatch):
    looks: list[tuple[int, int]] = []

    def late_once(some, operations, choose, m, samples):
        widen = some.blocks[0].widen
        config = choose(widen.kernel, m, widen.weights.rows, widen.weights.k)
        looks.append((config.number, samples))
        at_a_glance, longer = ((100.5, 100.0, 101.0, 110.0), (97.0, 99.0, 100.0, 90.0))
        return (at_a_glance if samples == looks[0][1] else longer)[config.number]

    monkeypatch.setattr(tuning, "step_us", late_once)
    tuner = StepTuner(CPU, TorchOperations(), Tuning.FRESH, frozenset((1,)))

    tuner.tune(model)

    assert chosen(tuner, model, 1)[0] == 0
    brief = looks[0][1]
    longer = next(i for i, (_, samples) in enumerate(looks) if samples > brief)  # in the last pass
    assert [number for number, _ in looks[longer - 4 : longer]] == [0, 1, 2, 3]
    assert {number for number, samples in looks[longer : longer + 3] if samples > brief} == {
        0,
        1,
        2,
    }


def test_choices_are_reused_unless_fresh_is_requested(model, timed):
    for how, expected in ((Tuning.REMEMBERED, True), (Tuning.REMEMBERED, False)):
        timed.clear()
        tuner = StepTuner(CPU, TorchOperations(), how, frozenset((1,)))
        tuner.tune(model)
        assert bool(timed) == expected
        assert chosen(tuner, model, 1) == [2, 1, 0, 0]
    StepTuner(CPU, TorchOperations(), Tuning.FRESH, frozenset((1,))).tune(model)
    assert timed


def test_heuristic_is_used_without_tuning(model, timed):
    tuner = StepTuner(CPU, TorchOperations(), Tuning.NONE, frozenset((1,)))

    tuner.tune(model)

    assert not timed
    assert chosen(tuner, model, 1) == [0, 0, 0, 0]


def test_timed_step_is_a_step_of_the_engine(model):
    requested: set[tuple[int, int, int]] = set()

    def choose(kernel, m, n, k):
        requested.add((m, n, k))
        return

    assert step_us(model, TorchOperations(), choose, 2) > 0.0
    block, head = model.blocks[0], model.head
    layers = [linear.weights for linear in (block.qkv, block.out, block.widen, block.down, head)]
    assert requested == {(2, weights.rows, weights.k) for weights in layers}
