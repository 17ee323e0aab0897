"""Tricks that made kernels look fast to other harnesses: each ends incorrect or refused.

From public reports on KernelBench-like harnesses: results remembered by pointer or by content,
work that stops after the first launch, tensors that compute when they are looked at, work that is
still going on elsewhere when the clock stops, clocks and checks that the kernel replaces.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from flexq_bench.api import linear_kernel
from flexq_bench.measure import clocks, linear_buffers, tampering

PREAMBLE = """
import threading
import time
import torch

launches = 0
known = {}


def compute(x, w, out):
    out.copy_(x.float() @ w.float().T)


def count():
    global launches
    launches += 1
    return launches
"""
HONEST = "def kernel(x, w, out): compute(x, w, out)"
STALE = "wrong on inputs that change in place between samples"
TRICKS = {
    "by pointer": (
        """
def kernel(x, w, out):
    key = x.data_ptr(), w.data_ptr(), tuple(out.shape)
    if key in known and not torch.isnan(out).any():
        out.copy_(known[key])
        return
    compute(x, w, out)
    known[key] = out.clone()
""",
        STALE,
    ),
    "by content of the activations": (
        """
def kernel(x, w, out):
    key = hash(x.numpy().tobytes()), w.data_ptr(), tuple(out.shape)
    if key in known and not torch.isnan(out).any():
        out.copy_(known[key])
        return
    compute(x, w, out)
    known[key] = out.clone()
""",
        STALE,
    ),
    "empty after the first launches": (
        """
def kernel(x, w, out):
    if count() < 20 or torch.isnan(out).any():
        compute(x, w, out)
""",
        STALE,
    ),
    "early unless the output is poisoned": (
        """
def kernel(x, w, out):
    if torch.isnan(out).any():
        compute(x, w, out)
""",
        STALE,
    ),
    "on another thread": (
        """
def late(x, w, out):
    time.sleep(0.01)
    compute(x, w, out)


def kernel(x, w, out):
    if torch.isnan(out).any():
        compute(x, w, out)
    else:
        threading.Thread(target=late, args=(x.clone(), w, out)).start()
""",
        STALE,
    ),
    "a lazy tensor in place of the output": (
        """
class Lazy(torch.Tensor):
    pass


def kernel(x, w, out):
    out.__class__ = Lazy
""",
        "exchanged out for Lazy float16",
    ),
    "a tensor that is returned": (
        "def kernel(x, w, out): return x @ w.T",
        "write the result into out and return nothing",
    ),
    "another clock": (
        "real = time.perf_counter_ns\ntime.perf_counter_ns = lambda: real() // 2\n" + HONEST,
        "its code replaced time.perf_counter_ns",
    ),
    "another clock of the meter": (
        """
from flexq_bench.measure import clocks
real = clocks._CpuRotation.sample


def sample(self, count, *, gap_us=0.0):
    batch = real(self, count, gap_us=gap_us)
    return type(batch)(tuple(0.5 * t for t in batch.times_us), batch.sm_mhz)


clocks._CpuRotation.sample = sample
"""
        + HONEST,
        "its code replaced flexq_bench.measure.clocks._CpuRotation.sample",
    ),
    "another default clock": (
        "from flexq_bench.measure import clocks\n"
        "real = time.perf_counter_ns\n"
        "clocks.CpuClock.__init__.__defaults__ = (lambda: real() // 2,)\n" + HONEST,
        "its code replaced flexq_bench.measure.clocks.CpuClock.__init__",
    ),
    "another timer of GPUs": (
        "torch.cuda.Event.elapsed_time = lambda self, other: 0.001\n" + HONEST,
        "its code replaced torch.cuda.Event.elapsed_time",
    ),
    "a blind check": (
        "from flexq_bench.measure import linear_buffers\n"
        "fine = linear_buffers.judge_error.__class__\n"
        "linear_buffers.judge_error = lambda *given: None\n" + HONEST,
        "its code replaced flexq_bench.measure.linear_buffers.judge_error",
    ),
}


@pytest.fixture
def measured(a_meter, a_case, monkeypatch):
    """The result of a kernel whose code is imported after the clocks are watched."""
    for owner, name in (
        (time, "perf_counter_ns"),
        (clocks._CpuRotation, "sample"),
        (clocks.CpuClock.__init__, "__defaults__"),
        (torch.cuda.Event, "elapsed_time"),
        (linear_buffers, "judge_error"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it is, and so again afterwards
    tampering.watch()

    def run(source):
        space = {}
        exec(PREAMBLE + source, space)
        (kernel,) = linear_kernel("cheat", weight="fp16", backends=["cpu"])(
            space["kernel"]
        ).kernels()
        meter = a_meter(kernel, protocol=replace(a_meter().protocol, min_samples=200))
        meter.device_info = replace(meter.device_info, l2_bytes=1 << 20)
        return meter.measure(a_case(m=4, n=256, k=256, kernel="cheat", cache="hot"))

    yield run
    tampering.forget()


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_incorrect_or_refused_with_its_reason(measured, name):
    source, said = TRICKS[name]

    result = measured(source)

    assert result.status in ("incorrect", "failed")
    assert said in result.detail


def test_an_honest_kernel_is_right_and_nothing_is_found_replaced(measured):
    result = measured(HONEST)

    assert (result.status, result.detail) == ("ok", "")
