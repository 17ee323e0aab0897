"""Rotation of weights: number of copies, and weights shared by cases within a memory limit."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import Operand
from flexq_bench.measure import PROTOCOL_CUDA
from flexq_bench.measure.weight_rotation import Content, LayerWeights, SharedWeights, copies_for

H200_L2 = 60 << 20


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


@pytest.mark.parametrize("copy_bytes", [12_845_056, 34_000_000, 470_000_000])
def test_cold_copies_exceed_the_cache_sixteen_times(copy_bytes):
    copies = copies_for("cold", copy_bytes, H200_L2, PROTOCOL_CUDA)

    assert copies * copy_bytes > 16 * H200_L2 >= (copies - 1) * copy_bytes


def test_small_cold_weights_exceed_the_cache_four_times():
    copies = copies_for("cold", 50_000, H200_L2, PROTOCOL_CUDA)

    assert copies * 50_000 > 4 * H200_L2 >= (copies - 1) * 50_000


def test_hot_weights_have_a_single_copy():
    assert copies_for("hot", 12_845_056, H200_L2, PROTOCOL_CUDA) == 1


def test_kernel_without_weights_has_a_single_copy():
    assert copies_for("cold", 0, H200_L2, PROTOCOL_CUDA) == 1


def test_weights_too_small_to_be_cold_are_unsupported():
    with pytest.raises(UnsupportedError, match=r"245,761 copies .* 16,384 is the most"):
        copies_for("cold", 1024, H200_L2, PROTOCOL_CUDA)


def test_cold_case_rotates_over_all_copies(a_meter, a_case, fake_linear):
    kernel = fake_linear()
    meter = a_meter(kernel)

    measured = meter.measure(a_case(n=256, k=256))

    copies = measured.extra["copies"]
    copy_bytes = 256 * 256 * 8
    factor = meter.protocol.min_cache_factor
    assert copies * copy_bytes > meter.protocol.cold_bytes(meter.device_info.l2_bytes, factor)
    # On a busy machine a placement may end before every copy has had its turn.
    turns = measured.n_samples // len(measured.placement_medians_us)
    assert len(set(kernel.weights_seen)) >= min(copies, turns)


def test_hot_case_has_a_single_copy(a_meter, a_case, fake_linear):
    measured = a_meter(fake_linear()).measure(a_case(cache="hot"))

    assert measured.status == "ok"
    assert measured.extra["copies"] == 1
