"""Work that is done again and again on tensors that stay in their place: on a GPU, one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

CALLS_BEFORE_RECORDING = 3  # libraries and optimizers make their state in them


class Replay:
    """A function without arguments or result; on a GPU it becomes a CUDA graph, which is replayed.

    A small block's training step is some hundred kernels of a few microseconds each, which a host
    launches slower than a GPU runs them. The function reads and writes tensors that are never
    replaced, reads none of them back and draws nothing. Replaying gives the numbers of calling.

    before_recording: called once, before the function is recorded.
    """

    def __init__(
        self,
        work: Callable[[], None],
        device: torch.device,
        before_recording: Callable[[], None] = lambda: None,
    ) -> None:
        self._work, self._before_recording = work, before_recording
        self._stream = _stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        """Do the work once, after all that the current stream was given before."""
        if self._stream is None:
            self._work()
            return
        if self._graph is None and self._calls < CALLS_BEFORE_RECORDING:
            self._calls += 1
            current = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._work()
            current.wait_stream(self._stream)
            return
        if self._graph is None:
            self._before_recording()
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may use the GPU meanwhile: only this one's launches are recorded.
            with torch.cuda.graph(
                self._graph, stream=self._stream, capture_error_mode="thread_local"
            ):
                self._work()
        self._graph.replay()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream to record on; None: there is no GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
