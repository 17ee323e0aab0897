"""Kernels that multiply by private copies of the weights, which they recognize by a few words.

As long as the weights have few contents, few private copies stay in the cache, where those of the
measurement are cold. With a content for each copy they are as cold.
"""

from __future__ import annotations

import pytest

from flexq_bench.kernels import registry
from flexq_bench.kernels.external.loading import load
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Meter
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

SOURCE = """
import torch
from flexq_bench.api import linear_kernel

known, used, y = {}, [], torch.empty(1, 512)


def key(w):
    return tuple(w[::4, 0].tolist())


def prepared(w):
    known[key(w)] = w.float()
    return w.float()


def multiply(x, w, out):
    torch.mm(x.float(), w.T, out=y)
    out.copy_(y)


@linear_kernel("private", weight="fp16", backends=["cpu"], prepare_weight=prepared)
def private(x, w, out):
    used.append(key(w))
    multiply(x, known[used[-1]], out)


@linear_kernel("given", weight="fp16", backends=["cpu"], prepare_weight=lambda w: w.float())
def given(x, w, out):
    used.append(key(w))
    multiply(x, w, out)


def padded(w):
    return w.float(), torch.zeros(1 << 22)


@linear_kernel("padded", weight="fp16", backends=["cpu"], prepare_weight=padded)
def padded_weights(x, w, padding, out):
    multiply(x, w, out)
"""
GEMM = GemmWorkload(1, 512, 512)


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "private_weights.py"
    path.write_text(SOURCE)
    loaded = load(KernelSource.parse(str(path))).kernels
    return {kernel.spec.name.partition(".")[2]: kernel for kernel in loaded}


@pytest.fixture
def of_the_file(kernels):
    """Names of the kernels' file."""
    return kernels["private"]._declared.function.__globals__


@pytest.fixture
def meter(kernels):
    def resolve(label, backend):
        return kernels.get(label) or registry.resolve(label, backend)

    return Meter("cpu", resolve=resolve)


def test_private_copies_rotate_like_measured_copies(of_the_file, meter):
    used = of_the_file["used"]

    with meter.device_guard():
        prepared = meter.prepare(Case("private", GEMM))
        with prepared.placed(0) as placed:
            for _ in range(5):
                used.clear()
                placed.rotation.sample(400)
                passes = list(batched(used, prepared.copies))[:-1]
                assert len(passes) > 3
                assert {len(set(copies)) for copies in passes} == {prepared.copies}


def batched(items, count):
    return (items[i : i + count] for i in range(0, len(items), count))


def test_each_copy_of_an_external_kernel_has_own_content(of_the_file, meter):
    result = meter.measure(Case("private", GEMM))

    assert result.status == "ok"
    checked = 2  # contents of the checks before and after
    assert len(of_the_file["known"]) == result.extra["copies"] + 1 + checked


def test_unread_bytes_do_not_reduce_the_copies(meter):
    with meter.device_guard():
        copies = meter.prepare(Case("padded", GEMM)).copies

    l2_bytes = meter.device_info.l2_bytes or meter.protocol.assumed_l2_bytes
    assert copies * GEMM.n * GEMM.k * 2 > meter.protocol.min_cache_factor * l2_bytes


@pytest.mark.slow
def test_time_with_private_copies_is_that_of_cold_weights(meter):
    private, given = (meter.measure(Case(name, GEMM)) for name in ("private", "given"))

    assert (private.status, given.status) == ("ok", "ok")
    assert private.median_us > 0.8 * given.median_us  # with two contents: 0.51 times
