"""The protocol on a real GPU: graphs, events, clocks."""

from __future__ import annotations

import time

import pytest
import torch

from flexq_bench.kernels.registry import resolve
from flexq_bench.measure import PROTOCOL_CUDA, Meter
from flexq_bench.measure.clocks import CudaClock
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def meter():
    return Meter("cuda:0")


def test_a_graph_launches_on_every_copy_equally_often():
    device = torch.device("cuda:0")
    counters = torch.zeros(5, device=device)
    rotation = CudaClock(device).rotation(lambda i: counters[i : i + 1].add_(1), 5, PROTOCOL_CUDA)
    counters.zero_()
    torch.cuda.synchronize()

    rotation.sample(3)

    assert rotation.launches % 5 == 0
    # One untimed replay goes before the three.
    assert counters.tolist() == [4 * rotation.launches / 5] * 5
    rotation.close()


def test_a_sample_of_the_shortest_kernel_is_filled():
    device = torch.device("cuda:0")
    empty = resolve("empty", "cuda")
    operand = empty.allocate(GemmWorkload(1, 1, 1), device, 0)
    rotation = CudaClock(device).rotation(lambda i: empty.launch(operand), 1, PROTOCOL_CUDA)

    median_us = rotation.sample(20).median_us

    assert rotation.launches * median_us > 0.6 * PROTOCOL_CUDA.target_sample_us
    rotation.close()


def test_event_time_agrees_with_the_host_clock_on_long_work():
    device = torch.device("cuda:0")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    rotation = CudaClock(device).rotation(lambda i: torch.mm(a, a, out=out), 1, PROTOCOL_CUDA)

    times = rotation.sample(20).times_us

    operations = 2 * 8192**3
    assert 20e12 < operations / (sorted(times)[10] / 1e6) < 1200e12
    rotation.close()


def test_a_cold_read_is_slower_than_a_hot_one(meter):
    gemm = GemmWorkload(1, 4096, 4096)

    cold = meter.measure(Case("read-6", gemm, cache="cold"))
    hot = meter.measure(Case("read-6", gemm, cache="hot"))

    assert cold.status in ("ok", "noisy"), cold.detail
    assert hot.status in ("ok", "noisy"), hot.detail
    assert cold.median_us > hot.median_us


def test_a_kernel_is_right_and_its_clocks_are_recorded(meter):
    measured = meter.measure(Case("flexq-w6a6", GemmWorkload(1, 4096, 4096)))

    assert measured.status in ("ok", "noisy"), measured.detail
    assert measured.exact
    assert measured.n_samples >= 50
    assert len(measured.placement_medians_us) >= 5
    assert 0.5 * measured.floor_us < measured.median_us < 10 * measured.floor_us
    assert measured.launch_us < measured.floor_us
    assert measured.sm_clock_mhz is not None


def test_gaps_lie_between_samples_with_their_clocks():
    device = torch.device("cuda:0")
    clock, out = CudaClock(device), torch.zeros(1 << 20, device=device)
    rotation = clock.rotation(lambda i: out.add_(1), 1, PROTOCOL_CUDA)
    free_mhz = clock.free_mhz()

    began = time.perf_counter()
    batch = rotation.sample(20, gap_us=2000.0)
    elapsed = time.perf_counter() - began

    assert elapsed > 20 * 2e-3
    assert all(0.9 * free_mhz < mhz < 1.1 * free_mhz for mhz in batch.sm_mhz)
    assert batch.median_us * rotation.launches < 2000.0  # no gap is part of a sample
    rotation.close()


def test_sustained_load_records_power_and_energy(meter):
    measured = meter.measure(Case("cublas-fp16", GemmWorkload(512, 4096, 4096), regime="sustained"))

    assert measured.regime == "sustained"
    assert measured.launch_j == pytest.approx(measured.power_w * measured.median_us / 1e6)
    assert 50.0 < measured.power_w < 1500.0
