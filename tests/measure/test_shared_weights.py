"""Weights of a layer are quantized and packed once for all numbers of tokens, within a bound."""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.formats import Operand
from flexq_bench.measure.weight_rotation import Content, LayerWeights, SharedWeights


def weights(size=1000):
    def draw(index):
        operand = Operand(torch.zeros(1, size, dtype=torch.int8), torch.ones(1, 1).half(), 8, None)
        return Content(operand, PackedOperand({"codes": operand.values}, 1, size))

    layer = LayerWeights(draw)
    layer.first(1)
    return layer  # 2,002 bytes


def test_least_recently_used_weights_are_evicted():
    shared, made = SharedWeights(2 * 2002), []

    def ask(key):
        return shared.get(key, lambda: made.append(key) or weights())

    first = ask("a")
    ask("b")
    assert ask("a") is first
    ask("c")  # b goes
    ask("a")
    ask("b")

    assert made == ["a", "b", "c", "b"]
    assert shared.nbytes <= 2 * 2002


def test_weights_beyond_the_limit_are_not_cached():
    shared = SharedWeights(100)

    assert shared.get("a", weights).nbytes == 2002
    assert shared.nbytes == 0


def test_layer_is_packed_once_for_all_token_counts(a_meter, a_case, fake_linear):
    class Packing(fake_linear):
        packed = 0

        def pack_weight(self, weight):
            self.packed += 1
            return super().pack_weight(weight)

    kernel = Packing()
    meter = a_meter(kernel)
    checks = 6  # weights of the checks before and after are drawn for each case

    first = meter.measure(a_case(m=1))
    assert kernel.packed == 2 + checks
    second = meter.measure(a_case(m=4))

    assert kernel.packed == 2 + 2 * checks
    assert (first.status, second.status) == ("ok", "ok")
