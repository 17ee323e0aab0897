"""Time of each part of a decode step, from a profiled replay of its CUDA graph.

Kernels overlap (programmatic dependent launch), so the sum of their durations exceeds the step. The
time of a kernel is therefore counted from the end of all kernels before it to its own end. These
times add up to the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from flexq_bench.decode.architecture import LAYERS
from flexq_bench.kernels.cuda.grouped.layer import GROUPED, NORMED_ROUTE
from flexq_bench.kernels.decoder.attention import ATTENTION
from flexq_bench.kernels.decoder.cuda_operations import (
    ATTENTION_SUM,
    HEAD_NORM,
    NORM,
    PICK,
    RELU,
    SILU_MUL,
)
from flexq_bench.kernels.runtime.ranks import SUM_KERNELS
from flexq_bench.workloads.blocks import Block

_ON_GPU = "CUDA"  # device type of torch.profiler
EMBEDDING, SAMPLING, HEAD = "embedding", "sampling", "lm_head"
EXCHANGE = "exchange"  # sums over several GPUs
_ACTIVATION = {"llama": "silu_mul", "opt": "relu"}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a step. Microseconds, from any origin."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Share:
    """Time that one part adds to a step. count: kernels. us: microseconds of the step."""

    part: str
    count: int
    us: float


def shares(launches: Sequence[Launch], block: Block, layers: int) -> list[Share]:
    """Time of the parts of one step, ordered by first occurrence.

    launches: in order of their start. Linear layers are identified by the fused kernels around
    them. Raises ValueError if the kernels don't match the number of layers.
    """
    parts = parts_of([launch.name for launch in launches], block, layers)
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    done = launches[0].start_us
    for part, launch in zip(parts, launches, strict=True):
        counts[part] = counts.get(part, 0) + 1
        times[part] = times.get(part, 0.0) + max(0.0, launch.end_us - done)
        done = max(done, launch.end_us)
    return [Share(part, counts[part], times[part]) for part in counts]


def parts_of(names: Sequence[str], block: Block, layers: int) -> list[str]:
    """The part of the step of each kernel. Raises ValueError as `shares`."""
    qkv, out, widen, down = LAYERS[block]
    norms = 2 * layers + 1
    count = sum(name in (NORM, NORMED_ROUTE) for name in names)
    if count != norms:
        raise ValueError(f"a step of {layers} layers has {norms} norms, the profile has {count}")
    parts, current, norm = [], EMBEDDING, 0
    for name in names:
        if name in (NORM, NORMED_ROUTE):
            norm += 1
            parts.append("norm")
            current = HEAD if norm == norms else qkv if norm % 2 else widen
        elif name == HEAD_NORM:
            parts.append("norm")
        elif name.startswith(SUM_KERNELS):
            parts.append(EXCHANGE)
        elif name in (ATTENTION, ATTENTION_SUM):
            parts.append("attention")
            current = out
        elif name in (SILU_MUL, RELU):
            parts.append(_ACTIVATION[block])
            current = down
        else:
            if name == PICK:
                current = SAMPLING
            parts.append(current)
            if name.startswith(GROUPED):
                current = down
    return parts


def record(run: Callable[[], object], repeats: int) -> list[list[Launch]]:
    """Profile `repeats` runs; returns the kernels of each in order of their start. Needs a GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    launches = sorted(_launches(profiler), key=lambda launch: launch.start_us)
    size = len(launches) // repeats
    return [launches[i * size : (i + 1) * size] for i in range(repeats)]


def _launches(profiler: torch.profiler.profile) -> Iterable[Launch]:
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        is_kernel = event.device_type.name == _ON_GPU
        if is_kernel and not event.name.startswith(("Memcpy", "Memset")):
            yield Launch(event.name, event.time_range.start, event.time_range.end)
