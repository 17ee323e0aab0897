"""A function that is called often on the same tensors, captured as a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.runtime.graph_capture import captured

WARMUP_CALLS = 3  # before capture: libraries and optimizers make their state in them


class GraphedCallable:
    """A function without arguments or result; on a GPU it is captured once and replayed.

    A small block's training step is some hundred kernels of a few microseconds each, which a host
    launches slower than a GPU runs them. The function reads and writes tensors that are never
    replaced, reads none of them back and draws nothing. A replay gives the numbers of a call.

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
    """A stream to capture on; None: there is no GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
