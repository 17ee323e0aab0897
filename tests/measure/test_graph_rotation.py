"""The rotation of a GPU, on a CPU: launches are recorded once and replayed, as in a CUDA graph.

A replay runs none of the measuring code, so what a launch reads and writes is fixed when it is
captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from flexq_bench.kernels.reference import reference_of
from flexq_bench.measure import clocks, linear_work
from flexq_bench.measure.check import judge_error
from flexq_bench.measure.inputs import realistic_inputs


class Recorded:
    """Calls recorded during a capture."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.calls.clear()


class Idle:
    """A stream, event, clock or shuffle that does nothing."""

    device = None

    def __init__(self, *arguments: object) -> None:
        self.spans = arguments[0] if arguments else 0

    def clocks_mhz(self) -> list[None]:
        return [None] * self.spans

    def elapsed_time(self, _stop: object) -> float:
        return 1.0

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments: None


@pytest.fixture
def graphs(monkeypatch):
    """Captured launches, and copies of their outputs, instead of those of the CPU's rotation."""
    capturing: list[Recorded] = []

    @contextmanager
    def captured(_stream):
        capturing.append(Recorded())
        yield capturing[-1]
        capturing.pop()

    def recorded(function):
        def call(*arguments, **named):
            if capturing:
                capturing[-1].calls.append(lambda: function(*arguments, **named))
            else:
                function(*arguments, **named)

        return call

    def rotation(_clock, timed):
        return clocks._CudaRotation(timed, Idle())

    def begin(made, *arguments, **named):
        initialize(made, *arguments, **named)
        made._launch = recorded(made._launch)

    initialize = linear_work.LinearWork.__init__
    monkeypatch.setattr(linear_work.LinearWork, "__init__", begin)
    monkeypatch.setattr(torch, "index_select", recorded(torch.index_select))
    monkeypatch.setattr(clocks, "captured", captured)
    monkeypatch.setattr(clocks, "ClockStamps", Idle)
    monkeypatch.setattr(clocks, "BlockShuffle", Idle)
    monkeypatch.setattr(clocks, "_timing_events", lambda count: [Idle() for _ in range(count)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(clocks.CpuClock, "_rotation", rotation)


def honest(kernel, x, w, out):
    torch.matmul(x, w.T, out=kernel.sums)
    out.copy_(kernel.sums)


def only_for_nan(kernel, x, w, out):
    """Compute only what a check fills with NaN, and a placement's first launches."""
    kernel.computed += 1
    if kernel.computed < 10 or out.isnan().any():
        honest(kernel, x, w, out)


@pytest.fixture(params=[honest, only_for_nan], ids=lambda way: way.__name__)
def prepared(request, graphs, a_meter, a_case, fake_linear, fast):
    class Kernel(fake_linear):
        computed = 0
        sums = torch.empty(2, 64, dtype=torch.float64)

        def gemm(self, x, w, out, *, bias=None, config=None):
            request.param(self, x.buffers["real"], w.buffers["real"], out)

    kernel = Kernel()
    protocol = replace(fast, target_sample_us=0.0, min_sample_us=0.0)
    # Of a secret with which outputs are kept in the few batches of these tests.
    meter = a_meter(kernel, protocol=protocol, secret=1)
    with meter.device_guard():
        yield kernel, meter.prepare(a_case(cache="cold"))


def test_kernel_must_compute_every_launch(prepared):
    kernel, case = prepared
    with case.placed(0) as placed:
        kernel.computed = 0
        for _ in range(5):
            placed.rotation.sample(4)
        wrong = placed.inspect()

    assert bool(wrong) == (kernel.computed > 0)


def test_last_launch_of_a_turn_has_the_given_inputs(prepared):
    kernel, case = prepared
    gemm, device = case.case.gemm, torch.device("cpu")
    errors = []
    with case.placed(0) as placed:
        kernel.computed = 0
        weights = realistic_inputs(kernel, gemm, device, 1).w
        for turn in range(6):
            if turn == 3:
                weights = realistic_inputs(kernel, gemm, device, 2).w
            inputs = replace(realistic_inputs(kernel, gemm, device, 10 + turn), w=weights)
            placed.buffers.fill(inputs, placed.config, weights=turn in (0, 3))
            placed.rotation.sample(3)
            reference = reference_of(kernel.spec, inputs.x, weights)
            errors.append(judge_error(placed.buffers.outputs()["out"], reference, 1e-2).detail)
        wrong = placed.inspect()

    assert bool(wrong or any(errors)) == (kernel.computed > 0)
