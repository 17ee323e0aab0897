"""Which flags a launch gets, and which number; the driver and the stream are stand-ins."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.errors import KernelError, UnsupportedError
from flexq_bench.kernels.runtime import driver as driver_module
from flexq_bench.kernels.runtime import launch_flags as module
from flexq_bench.kernels.runtime.driver import cuda_driver
from flexq_bench.kernels.runtime.launch_flags import launch_flags


class Machine:
    """A current stream, and the driver that knows what is being captured."""

    def __init__(self):
        self.stream = 0
        self.capturing: dict[int, int] = {}
        self.error = 0

    def cuStreamGetCaptureInfo_v2(  # noqa: N802
        self, stream, status, capture, *rest
    ):
        assert rest == (None, None, None)
        number = self.capturing.get(stream.value or 0)
        status._obj.value = int(number is not None)
        capture._obj.value = number or 0
        return self.error


@pytest.fixture
def machine(monkeypatch):
    fake = Machine()
    monkeypatch.setattr(module, "cuda_driver", lambda: fake)
    monkeypatch.setattr(module, "_current_stream", lambda: (torch.device("cpu"), fake.stream))
    monkeypatch.setattr(module, "_BY_STREAM", {})
    return fake


def test_consecutive_launches_share_flags_with_different_numbers(machine):
    launches = [launch_flags(264) for _ in range(5)]

    words, _ = launches[0]
    assert all(found is words for found, _ in launches)
    assert len({number for _, number in launches}) == 5
    assert words.shape == (264,)
    assert not set(words.tolist()) & {number for _, number in launches}


def test_flags_of_an_aborted_launch_are_harmless(machine):
    words, aborted = launch_flags(8)
    words[:3] = aborted

    again, number = launch_flags(8)

    assert again is words
    assert not bool((again == number).any())


def test_streams_have_flags_of_their_own(machine):
    first, _ = launch_flags(8)
    machine.stream = 7
    second, _ = launch_flags(8)
    machine.stream = 0

    assert second is not first
    assert launch_flags(8)[0] is first


def test_captured_graph_has_own_flags_on_each_stream(machine):
    eager, _ = launch_flags(8)
    machine.capturing = {0: 41, 7: 41}
    captured = [launch_flags(8) for _ in range(2)]
    machine.stream = 7
    forked, _ = launch_flags(8)
    machine.stream, machine.capturing = 0, {0: 42}
    next_graph, _ = launch_flags(8)
    machine.capturing = {}
    after, _ = launch_flags(8)

    assert captured[0][0] is captured[1][0]
    assert captured[0][1] != captured[1][1]
    flags = [eager, captured[0][0], forked, next_graph, after]
    assert len({words.data_ptr() for words in flags}) == 5
    assert not any(bool(words.any()) for words in flags)


def test_flags_begin_anew_when_the_numbers_end(machine, monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", range(1, 3))

    launches = [launch_flags(8) for _ in range(5)]

    assert [number for _, number in launches] == [1, 2, 1, 2, 1]
    assert len({words.data_ptr() for words, _ in launches}) == 3


def test_kernels_that_want_more_flags_have_others(machine):
    assert launch_flags(8)[0].shape == (8,)
    assert launch_flags(16)[0].shape == (16,)


def test_a_refusal_says_so(machine):
    machine.error = 906

    with pytest.raises(KernelError, match="cuStreamGetCaptureInfo failed with 906"):
        launch_flags(8)


def test_a_missing_driver_says_so(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(driver_module.ctypes, "CDLL", missing)
    cuda_driver.cache_clear()

    with pytest.raises(UnsupportedError, match="needs NVIDIA's driver"):
        cuda_driver()
