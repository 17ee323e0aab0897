"""A kernel that can't be captured in a CUDA graph fails alone: what comes after it is measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from cheats import Honest

from flexq_bench.kernels.runtime.graph_capture import captured
from flexq_bench.measure import PROTOCOL_CUDA, Meter
from flexq_bench.measure.tuning import Tuning
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

BRIEF = replace(PROTOCOL_CUDA, budget_s=0.5)  # its time is not what is tested
GEMM = GemmWorkload(4, 512, 512)


class InCapture(Honest):
    """Right, and does something of its own while it is captured."""

    def write(self, x, w, out):
        super().write(x, w, out)
        if torch.cuda.is_current_stream_capturing():
            self.spoil(out)

    def spoil(self, out):
        """What it does then."""


class Raises(InCapture):
    def spoil(self, out):
        raise ValueError("no captures, please")


class Synchronizes(InCapture):
    def spoil(self, out):
        torch.cuda.synchronize()


class SynchronizesUnheard(InCapture):
    def spoil(self, out):
        with suppress(RuntimeError):
            out.sum().item()


class LeavesAStreamUnjoined(InCapture):
    def spoil(self, out):
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            out.add_(0)


class LeavesAnotherStreamCurrent(InCapture):
    def spoil(self, out):
        torch.cuda.set_stream(torch.cuda.Stream())


class DrawsWithAGeneratorOfItsOwn(InCapture):
    """Which some versions of torch refuse: the capture doesn't know of the generator."""

    def spoil(self, out):
        generator = torch.Generator("cuda").manual_seed(0)
        out.add_(0 * torch.randn(out.shape, generator=generator, device="cuda").half())


class Draws(InCapture):
    """By the default generator, which every capture knows."""

    def spoil(self, out):
        out.add_(0 * torch.randn(out.shape, device="cuda").half())


SPOILERS = [
    Raises,
    Synchronizes,
    SynchronizesUnheard,
    LeavesAStreamUnjoined,
    LeavesAnotherStreamCurrent,
]


def measure(kernel, cache="hot"):
    meter = Meter("cuda:0", BRIEF, resolve=lambda label, backend: kernel, tuning=Tuning.NONE)
    return meter.measure(Case("cheat", GEMM, cache=cache))


def assert_the_process_goes_on():
    """Look at everything that a failed capture may spoil."""
    assert not torch.cuda.is_current_stream_capturing()
    before = torch.cuda.get_rng_state()
    first = torch.randn(1000, device="cuda")
    torch.cuda.set_rng_state(before)
    assert torch.equal(torch.randn(1000, device="cuda"), first)
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_honest_kernel_is_measured_after_a_failed_capture(spoiler, cache):
    failed = measure(spoiler("cuda"), cache)
    honest = measure(Honest("cuda"), cache)

    assert failed.status == "failed", failed.status
    assert honest.status in ("ok", "noisy"), honest.detail
    assert_the_process_goes_on()


def test_error_of_the_kernel_is_reported():
    assert measure(Raises("cuda")).detail == "ValueError: no captures, please"


@pytest.mark.parametrize(
    ("drawing", "statuses"),
    [(Draws, ("ok", "noisy")), (DrawsWithAGeneratorOfItsOwn, ("ok", "noisy", "failed"))],
)
def test_honest_kernel_is_measured_after_random_numbers_in_a_capture(drawing, statuses):
    drawn = measure(drawing("cuda"))
    honest = measure(Honest("cuda"))

    assert drawn.status in statuses, drawn.detail
    assert honest.status in ("ok", "noisy"), honest.detail
    assert_the_process_goes_on()


def spoil(stream, pool=None, values=1):
    """A capture that allocates float32 values and then fails."""

    def synchronize():
        with captured(stream, pool=pool):
            torch.zeros(values, device="cuda")
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError):
        synchronize()


def test_a_failed_capture_draws_nothing_and_keeps_no_memory():
    torch.cuda.manual_seed(0)
    expected = torch.randn(8, device="cuda")
    torch.cuda.manual_seed(0)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()

    spoil(torch.cuda.Stream(), values=2**26)

    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved + 2**27
    assert torch.equal(torch.randn(8, device="cuda"), expected)


def test_graphs_of_a_pool_survive_a_failed_capture():
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    with captured(stream, pool=pool) as earlier:
        y = x + 1

    spoil(stream, pool)
    with captured(stream) as later:
        z = x + 2
    earlier.replay()
    later.replay()
    torch.cuda.synchronize()

    assert torch.equal(y, torch.full_like(y, 2))
    assert torch.equal(z, torch.full_like(z, 3))
