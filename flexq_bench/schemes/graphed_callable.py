"""A function without arguments, called often on the same tensors: a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexq_bench.kernels.runtime.graph_capture import captured

WARMUP_CALLS = 3  # before capture: libraries and optimizers create their state


class GraphedCallable:
    """A function without arguments or result; on a GPU it is captured once and replayed.

    The training step of a small block is some hundred kernels of a few microseconds each: launching
    them takes longer than running them. The function must use the same tensors in each call, must
    not read their values on the host, and must not draw random numbers. A replay gives the same
    numbers as a call.

    before_capture: called once, before the function is captured.
    """

    def __init__(
        self,
        work: Callable[[], None],
        device: torch.device,
        before_capture: Callable[[], None] = lambda: None,
    ) -> None:
        self._work, self._before_capture = work, before_capture
        self._stream = _stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        """Run the function once, ordered after the current stream's earlier work."""
        if self._stream is None:
            self._work()
            return
        if self._graph is None and self._calls < WARMUP_CALLS:
            self._calls += 1
            current = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._work()
            current.wait_stream(self._stream)
            return
        if self._graph is None:
            self._before_capture()
            with captured(self._stream) as graph:
                self._work()
            self._graph = graph
        self._graph.replay()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream to capture on; None: there is no GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
