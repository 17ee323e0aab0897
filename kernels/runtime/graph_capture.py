"""Capture of launches in a CUDA graph, such that a failed capture leaves the process as it was.

torch ends a capture in two steps: the driver's, then its own. Where the driver's step fails (the
work synchronized, or was left on a stream that isn't joined), torch 2.11 and 2.12 skip their own:
the device's default random number generator stays in its capturing state, so that every later draw
raises "Offset increment outside graph capture encountered unexpectedly", and the allocator goes on
counting the capture as one under way. Both are undone here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Pool = Any  # what torch.cuda.graph_pool_handle returns
# Graphs whose capture failed: the allocators of torch keep a pointer to each, and call it.
_failed: list[torch.cuda.CUDAGraph] = []


@contextmanager
def captured(
    stream: torch.cuda.Stream, *, pool: Pool | None = None
) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what the block launches on the stream, which is the current one in it.

    pool: memory pool of captures that never run at the same time; None: one of its own. Only what
    this thread does can spoil the capture. The graph is complete when the block is left.

    Raises what the block raises, and torch.AcceleratorError (a RuntimeError) for work that can't be
    captured: the device can be used as before in either case.
    """
    graph = torch.cuda.CUDAGraph()
    shared = pool is not None
    pool = pool if pool is not None else torch.cuda.graph_pool_handle()
    of_block: BaseException | None = None
    try:
        # The outer stream context restores the current stream also where ending raises.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                yield graph
            except BaseException as error:
                of_block = error
                raise
    except BaseException as error:
        if error is not of_block:  # else the capture ended well, without what was to follow
            _undo(graph, stream, pool, shared=shared)
        graph.reset()
        if of_block is not None:
            raise of_block  # noqa: B904  # that the capture is spoilt says less than what spoilt it
        raise


def _undo(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Pool, *, shared: bool
) -> None:
    """Complete what ending the capture left out.

    A step that fails is left out: the device is broken then, which its next use tells.
    """
    _failed.append(graph)
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        with suppress(RuntimeError):
            # The block left another stream as the current one, on which torch refuses to end it.
            if torch.cuda.is_current_stream_capturing():
                graph.capture_end()
        with suppress(RuntimeError):
            _forget_pool(stream.device.index, pool, shared=shared)
        with suppress(RuntimeError):
            _capture_nothing(stream)


def _forget_pool(device: int, pool: Pool, *, shared: bool) -> None:
    """End the allocator's part of a capture. Raises RuntimeError where none is under way.

    shared: other captures may still come to the pool, which one that nobody uses doesn't permit.
    """
    bindings: Any = torch._C  # private, and so perhaps not there: memory stays reserved without it
    end = getattr(bindings, "_cuda_endAllocateToPool", None)
    release = getattr(bindings, "_cuda_releasePool", None)
    if end is not None and release is not None:
        end(device, pool)
        if not shared:
            release(device, pool)


def _capture_nothing(stream: torch.cuda.Stream) -> None:
    """Take the default generator out of its capturing state: a capture that ends well does.

    It draws nothing, so the generator goes on where it was.
    """
    word = torch.zeros(1, dtype=torch.int32, device=stream.device)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        word.zero_()  # torch warns of graphs without any work
    finally:
        graph.capture_end()
        graph.reset()
