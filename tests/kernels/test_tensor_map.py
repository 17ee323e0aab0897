"""What the driver is asked to encode; the encoding itself is its own."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.runtime import tensor_map
from flexq_bench.kernels.runtime.tensor_map import plain_rows, swizzled_rows


class Driver:
    """Takes down what is asked for."""

    def __init__(self, status=0):
        self.status = status
        self.asked: list[tuple[Any, ...]] = []

    def cuTensorMapEncodeTiled(self, words, *rest):  # noqa: N802
        assert ctypes.addressof(words) % 64 == 0
        words[0] = 7
        self.asked.append(tuple(list(r) if isinstance(r, ctypes.Array) else r for r in rest))
        return self.status


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(tensor_map, "cuda_driver", lambda: fake)
    tensor_map._encoded.cache_clear()
    yield fake
    tensor_map._encoded.cache_clear()


def test_codes_are_boxes_of_rows_in_the_swizzle(driver):
    found = swizzled_rows(torch.zeros(300, 512, dtype=torch.int8), 256, 128)

    kind, rank, _, sizes, strides, box, steps, _, swizzle, _, _ = driver.asked[0]
    assert found.words[0] == 7
    assert (kind, rank.value, swizzle) == (0, 2, 3)
    assert (sizes, strides, box, steps) == ([512, 300], [512], [128, 256], [1, 1])


def test_whole_tiles_are_rows_of_eight_bytes(driver):
    plain_rows(torch.zeros(20, 32, 1536, dtype=torch.uint8), 8, 1536)

    kind, _, _, sizes, strides, box, _, _, swizzle, _, _ = driver.asked[0]
    assert (kind, swizzle) == (4, 0)
    assert (sizes, strides, box) == ([32 * 192, 20], [32 * 1536], [192, 8])


def test_a_group_of_tokens_scales_is_a_row(driver):
    plain_rows(torch.zeros(7, 264), 1, 4 * 256)

    _, _, _, sizes, strides, box, _, _, _, _, _ = driver.asked[0]
    assert (sizes, strides, box) == ([132, 7], [4 * 264], [128, 1])


def test_the_same_memory_is_encoded_once(driver):
    codes = torch.zeros(8, 128, dtype=torch.int8)

    assert swizzled_rows(codes, 8, 128) == swizzled_rows(codes, 8, 128)
    assert len(driver.asked) == 1


def test_a_refusal_says_so(driver):
    driver.status = 1

    with pytest.raises(KernelError, match="cuTensorMapEncodeTiled failed with 1"):
        swizzled_rows(torch.zeros(8, 128, dtype=torch.int8), 8, 128)
