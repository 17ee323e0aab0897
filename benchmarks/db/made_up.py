"""Synthetic fleet: four kinds of GPU, 500 series, one commit per night, from fixed seeds."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.models import get_model

FIRST_NIGHT = datetime(2025, 1, 1, 22, tzinfo=UTC)
GPUS = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A6000", "NVIDIA GeForce RTX 3090")
KERNELS = ("flexq-w6a6", "flexq-w6a8", "cublas-fp16", "cublaslt-w8a8", "abq-w6a6")
TOKENS: tuple[int, ...] = (1, 2, 4, 8, 16)
LAYERS = (
    *(("llama-7b", layer) for layer in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ("llama-13b", "o_proj"),
)
PLACEMENTS = 5
SAMPLES = 100  # of a measurement, over its placements
_NOISE = 0.004  # sigma (ln) of a night
_STEP = 0.05
_STEP_EVERY = 10  # nights: then a kernel gets slower, or what was slow is mended


@dataclass(frozen=True, slots=True)
class Place:
    """One series: a case on a kind of GPU, with the time that it takes at first."""

    case: Case
    model: str
    layer: str
    gpu: str
    base_us: float
    floor_us: float


def places(tokens: Sequence[int] = TOKENS) -> list[Place]:
    """Every series, those of a GPU together: 100 for each number of tokens."""
    rng = np.random.default_rng(0)
    found = []
    for gpu in GPUS:
        for model, layer in LAYERS:
            shape = next(s for s in get_model(model).all_layers() if s.name == layer)
            floor_us = shape.n * shape.k * 6 / 8 / 3e6
            for kernel in KERNELS:
                for m in tokens:
                    case = Case(kernel, GemmWorkload(m, shape.n, shape.k))
                    base_us = floor_us * float(rng.uniform(1.3, 3.0)) + 0.05 * m
                    found.append(Place(case, model, layer, gpu, base_us, floor_us))
    return found


def device(gpu: str) -> DeviceInfo:
    return DeviceInfo(f"GPU-{zlib.crc32(gpu.encode()):08x}", gpu, "cuda", sm_count=100)


def commit(night: int) -> CommitInfo:
    """The commit that is measured in a night; two more lie between it and the night's before."""
    return CommitInfo(
        sha=f"{zlib.crc32(str(night).encode()):08x}{night:032x}",
        parent=None,
        topo_order=3 * night + 1,
        dirty=False,
        subject=f"Change {3 * night + 1} of the kernels",
        author=("Ada", "Bo", "Cy")[night % 3],
        committed_at=(began(night) - timedelta(hours=6)).isoformat(),
    )


def began(night: int) -> datetime:
    return FIRST_NIGHT + timedelta(days=night)


def measured_in(night: int, of: list[Place]) -> list[Place]:
    """Half of the GPUs are free in a night, the other half in the next one."""
    free = GPUS[:2] if night % 2 == 0 else GPUS[2:]
    return [place for place in of if place.gpu in free]


def slow_kernel(night: int) -> str | None:
    """The kernel that is slower from this night on, for `_STEP_EVERY` nights; None: none."""
    turn, since = divmod(night, _STEP_EVERY)
    return KERNELS[turn // 2 % 2] if turn % 2 and since == 0 else None


def mended_kernel(night: int) -> str | None:
    """The kernel that is as fast as at first again from this night on; None: none."""
    return slow_kernel(night - _STEP_EVERY) if night >= _STEP_EVERY else None


def medians(night: int, of: list[Place]) -> np.ndarray:
    """[places], µs: what the night measures."""
    rng = np.random.default_rng([1, night])
    base = np.array([place.base_us for place in of])
    slow = slow_kernel(night - night % _STEP_EVERY)
    steps = np.array([_STEP if place.case.kernel == slow else 0.0 for place in of])
    return base * np.exp(steps + rng.normal(0, _NOISE, len(of)))


def samples(night: int, median_us: np.ndarray) -> np.ndarray:
    """[places, placements, samples], µs, around the medians."""
    rng = np.random.default_rng([2, night])
    shape = (len(median_us), PLACEMENTS, SAMPLES // PLACEMENTS)
    offsets = rng.normal(0, 0.002, (*shape[:2], 1)) + rng.normal(0, 0.001, shape)
    return median_us[:, None, None] * np.exp(offsets)


def slow_comparisons(night: int, of: list[Place]) -> Iterator[CaseComparison]:
    """An interleaved comparison of two commits for the kernel that the night made slower."""
    for place in of:
        if place.case.kernel == slow_kernel(night):
            yield compared(place.case, night, _STEP)


def compared(case: Case, night: int, log_ratio: float) -> CaseComparison:
    """Comparison of the night's commit with the previous one, over six placements of two blocks."""
    rng = np.random.default_rng([3, night, zlib.crc32(case.key.encode())])
    labels = np.repeat(np.arange(6), 2)
    logs = log_ratio + rng.normal(0, 0.001, 6)[labels] + rng.normal(0, 0.0003, labels.size)
    comparison = Comparison(
        base_us=tuple(np.full(labels.size, 10.0).tolist()),
        head_us=tuple((10.0 * np.exp(logs)).tolist()),
        placement=tuple(labels.tolist()),
        correct=True,
        same_binary=False,
    )
    return CaseComparison(
        case,
        commit(night - 1).sha,
        commit(night).sha,
        comparison,
        confirm(comparison),
        base_binary="one",
        head_binary="other",
        base_config={"block_n": 64},
        head_config={"block_n": 64},
        detail="",
    )


def identity(*parts: object) -> str:
    """A uuid that the same parts always get."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, " ".join(map(str, ("flexq-bench", *parts)))))
