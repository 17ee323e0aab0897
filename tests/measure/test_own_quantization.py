"""External kernels with a quantization rule of their own, or with weights stored elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cheats import Honest

from flexq_bench.kernels.contract import KernelSpec, PackedOperand
from flexq_bench.kernels.formats import NumberFormat, quantize

INT4, INT8 = NumberFormat(4, 128), NumberFormat(8, 128)


class OwnRule(Honest):
    """A right W4A8 GEMM of what its own rules return."""

    def __init__(self, weight=None, activation=None):
        super().__init__()
        self.spec = KernelSpec("theirs", "cpu", INT4, INT8, "W4A8", source_hash="7")
        if weight is not None:
            self.quantize_weight = lambda w: quantize(weight(w), INT4)
        if activation is not None:
            self.quantize_activation = lambda x: quantize(activation(x), INT8)


class Handle(OwnRule):
    """Its packed weights are the place of the weights in a list."""

    def __init__(self):
        super().__init__()
        self._kept = []

    def pack_weight(self, weight):
        self._kept.append(weight.dequantize())
        place = torch.full((8,), len(self._kept) - 1)
        return PackedOperand({"place": place}, weight.rows, weight.k)

    def gemm(self, x, w, out, *, bias=None, config=None):
        out.copy_(x.buffers["real"] @ self._kept[int(w.buffers["place"][0])].T)


def without_half(values):
    return values * (torch.arange(values.shape[1]) % 2)


def clipped(values):
    return values.clamp(-0.05, 0.05)


def rotated(values):
    """Pairs of columns by 45 degrees: products stay what they were."""
    even, odd = values[:, ::2].float(), values[:, 1::2].float()
    return torch.cat([even + odd, even - odd], 1).mul(0.5**0.5).half()


@pytest.fixture
def measured(a_meter, a_case):
    def run(kernel):
        meter = a_meter(kernel)
        meter.device_info = replace(meter.device_info, l2_bytes=1 << 20)
        return meter.measure(a_case(m=4, n=256, k=256, kernel="theirs", cache="hot"))

    return run


@pytest.mark.parametrize(
    "rules",
    [
        {"weight": torch.zeros_like},
        {"activation": torch.zeros_like},
        {"weight": without_half},
    ],
)
def test_rule_that_drops_values_is_incorrect(measured, rules):
    result = measured(OwnRule(**rules))

    assert result.status == "incorrect"
    assert "its own quantization changes results by " in result.detail


@pytest.mark.parametrize(
    "rules", [{}, {"weight": clipped}, {"weight": rotated, "activation": rotated}]
)
def test_rule_that_rounds_differently_is_right(measured, rules):
    assert (measured(OwnRule(**rules)).status, measured(OwnRule(**rules)).detail) == ("ok", "")


def test_weights_stored_elsewhere_are_refused(measured):
    result = measured(Handle())

    assert result.status == "failed"
    assert "64 bytes were made of 32,768 bytes of weights: return all" in result.detail
