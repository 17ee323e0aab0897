"""CUDA graph capture that restores torch's state after a failed capture.

torch ends a capture in two steps: the driver's, then its own. If the driver's step fails (the work
synchronized, or forked a stream that was not joined), torch 2.11 and 2.12 skip their own: the
device's default random number generator stays in its capturing state, so that every later draw
raises "Offset increment outside graph capture encountered unexpectedly", and the caching allocator
still treats the capture as active. This module completes torch's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Pool = Any  # what torch.cuda.graph_pool_handle returns
# Keeps graphs whose capture failed alive: torch's allocator keeps a pointer to each and calls it.
_failed: list[torch.cuda.CUDAGraph] = []


@contextmanager
def captured(
    stream: torch.cuda.Stream, *, pool: Pool | None = None
) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the launches of the block on `stream`, which is the current stream within it.

    pool: memory pool shared by graphs that never run at the same time; None: a new one. After a
    failed capture its graphs can be replayed, but nothing more captured in it: torch 2.11 can't end
    what its allocator of pinned memory records. Only calls of this thread can invalidate the
    capture. The graph is complete when the block is left.

    Raises the block's error, or torch.AcceleratorError (a RuntimeError) for work that can't be
    captured; the device remains usable in either case.
    """
    graph = torch.cuda.CUDAGraph()
    shared = pool is not None
    pool = pool if pool is not None else torch.cuda.graph_pool_handle()
    block_error: BaseException | None = None
    try:
        # The outer stream context restores the current stream even if ending the capture raises.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                yield graph
            except BaseException as error:
                block_error = error
                raise
    except BaseException as error:
        if error is not block_error:  # else the capture itself ended without an error
            _complete_capture_end(graph, stream, pool, shared=shared)
        graph.reset()
        if block_error is not None:
            raise block_error  # noqa: B904  # the cause, not the invalidated capture that follows from it
        raise


def captured_after_a_call(
    run: Callable[[], None], *, pool: Pool | None = None
) -> torch.cuda.CUDAGraph:
    """Call a function, then capture it, both on a new stream that the current stream joins.

    The call compiles, tunes and allocates, which can't be captured. pool, errors: as `captured`.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    with captured(stream, pool=pool) as graph:
        run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _complete_capture_end(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Pool, *, shared: bool
) -> None:
    """Complete the steps that torch skipped when ending the capture failed.

    Errors are ignored: the device is unusable then, and its next use raises.
    """
    _failed.append(graph)
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        with suppress(RuntimeError):
            # torch can't end a capture if the block changed the current stream.
            if torch.cuda.is_current_stream_capturing():
                graph.capture_end()
        with suppress(RuntimeError):
            _end_pool_allocation(stream.device.index, pool, shared=shared)
        with suppress(RuntimeError):
            _reset_generator(stream)


def _end_pool_allocation(device: int, pool: Pool, *, shared: bool) -> None:
    """End the allocator's part of a capture. Raises RuntimeError if none is active.

    shared: keep the pool, because other graphs may still use it.
    """
    bindings: Any = torch._C  # private, may be missing: then the memory stays reserved
    end = getattr(bindings, "_cuda_endAllocateToPool", None)
    release = getattr(bindings, "_cuda_releasePool", None)
    if end is not None and release is not None:
        end(device, pool)
        if not shared:
            release(device, pool)


def _reset_generator(stream: torch.cuda.Stream) -> None:
    """Reset the capturing state of the default generator by a capture that succeeds.

    The capture draws no random number, so the generator's sequence is unaffected.
    """
    cell = torch.zeros(1, dtype=torch.int32, device=stream.device)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        cell.zero_()  # torch warns about empty graphs
    finally:
        graph.capture_end()
        graph.reset()
