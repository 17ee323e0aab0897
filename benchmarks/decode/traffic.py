"""Times of decode steps; the bytes that one must read, and the rate of a read, which bound them."""

from __future__ import annotations

import time

import torch

from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import footprint
from flexq_bench.decode.weights import WeightSource
from flexq_bench.kernels.contract import Probe
from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.gemm import GemmWorkload

_READ_N, _READ_K = 2**16, 2**15  # FP16 weights of this shape are 4 GB
_READS, _WARM_UP_S = 5, 1.0


def step_bytes(source: WeightSource, batch: int, tokens: int, kv_bits: int) -> int:
    """Bytes of weights, and of keys and values of `tokens` a sequence, each once.

    Of the embedding a step reads a row a sequence, which is left out.
    """
    size = footprint(source, batch, tokens, kv_bits)
    of_model = source.architecture.dimensions
    unread = 0 if of_model.tied_embeddings else of_model.vocab * of_model.hidden * 2
    return size.weights + size.cache - unread


def read_rate() -> float:
    """Bytes a second of the fastest way to read 4 GB and do nothing with them."""
    probe = resolve("read-16", "cuda")
    assert isinstance(probe, Probe)
    shape = GemmWorkload(1, _READ_N, _READ_K)
    operand = probe.allocate(shape, torch.device("cuda"), 0)
    began = time.perf_counter()
    while time.perf_counter() - began < _WARM_UP_S:  # clocks that are still low would flatter steps
        probe.launch(operand)
        torch.cuda.synchronize()
    times: list[float] = []
    for config in probe.candidates(shape):
        for _ in range(_READS):
            start, stop = timing_event(), timing_event()
            start.record()
            probe.launch(operand, config)
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return operand.nbytes / min(times) * 1000


def step_times(engine: Engine, batch: int, bucket: int, count: int) -> list[float]:
    """Milliseconds of each of `count` steps of a prepared engine, one after the other."""
    marks = []
    for _ in range(count):
        start, stop = timing_event(), timing_event()
        start.record()
        engine.advance(batch, bucket)
        stop.record()
        marks.append((start, stop))
    marks[-1][1].synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]


def timing_event() -> torch.cuda.Event:
    """Return an event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
