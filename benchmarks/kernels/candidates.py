"""Times of all configurations of some kernels, against the read floor and other kernels, by shape.

    python benchmarks/kernels/candidates.py --kernels fp6-w6a16,dgq-w4a8 --m 1,4,8 [--suite NAME]
        [--shapes NxK,...] [--drawn COUNT --seed N] [--against KERNELS] [--seconds N]
        [--out FOLDER]

Needs a GPU. Each configuration is timed as briefly as by the tuner, with cold weights, which takes
half a second per case. Prints, for each kernel and number of tokens, the geometric mean of floor /
fastest over the shapes, the smallest of these ratios, and the loss of the configuration that is
used without tuning. The floor is the fastest read of as many bytes as the weights have, scales
included. --against: kernels whose fastest configurations are compared with the fastest, for example
cublaslt-w8a8,cublaslt-fp8. Shapes are those of a suite, unless some are given, and COUNT random
ones, drawn with the seed.
--out stores every time, one file per kernel, in the format that heuristic.py reads.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heuristic import prepared_linear, random_shapes, say, warm_meter, write_times

from flexq_bench.decode.loading import packed_bytes
from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.timed_choice import name_of
from flexq_bench.kernels.registry import resolve
from flexq_bench.measure import Meter
from flexq_bench.measure.prepared import PreparedCase
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.probes import READ_BITS, floor_kernel, shape_of_bytes
from flexq_bench.workloads.ranges import parse_ranges
from flexq_bench.workloads.suites import load_suite


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of a kernel on a shape, microseconds. us: of each configuration. default_us: of the one
    without tuning. others_us: the fastest of each kernel that it is compared with."""

    kernel: str
    gemm: GemmWorkload
    floor_us: float
    us: Mapping[str, float]
    default_us: float
    others_us: Mapping[str, float]

    @property
    def best_us(self) -> float:
        return min(self.us.values())


def times_of(prepared: PreparedCase) -> list[tuple[float, Config]]:
    """Time every configuration; the fastest is first."""
    timed = [(microseconds, config) for config, microseconds in prepared.time_candidates()]
    return sorted(timed, key=lambda pair: pair[0])


def fastest(meter: Meter, kernel: str, gemm: GemmWorkload) -> float:
    """Microseconds of a kernel's fastest candidate. Raises SystemExit if it has none."""
    times = times_of(prepared_linear(meter, kernel, gemm))
    if not times:
        raise SystemExit(f"{kernel} has no configurations to time: compare with another kernel")
    return times[0][0]


def measure(
    kernels: Sequence[str],
    tokens: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    seconds: float,
    out: Path | None,
    others: Sequence[str] = (),
) -> list[Timed]:
    """Shape by shape, until the seconds are over; results are saved as they come."""
    meter, began = warm_meter(), time.monotonic()
    results: list[Timed] = []
    with meter.device_guard():
        for n, k in shapes:
            if time.monotonic() - began > seconds:
                say(f"ended after {seconds:.0f} s, before {n}x{k}")
                break
            floors: dict[GemmWorkload, float] = {}
            others_us = {
                m: {other: fastest(meter, other, GemmWorkload(m, n, k)) for other in others}
                for m in tokens
            }
            for kernel in kernels:
                read = shape_of_bytes(packed_bytes(n, k, resolve(kernel, "cuda").spec.weight))
                if read not in floors:
                    floors[read] = fastest(meter, floor_kernel(READ_BITS), read)
                for m in tokens:
                    gemm = GemmWorkload(m, n, k)
                    prepared = prepared_linear(meter, kernel, gemm)
                    default, timed = prepared.config, times_of(prepared)
                    (best_us, best), slowest = timed[0], timed[-1][0]
                    default_us = next((us for us, config in timed if config == default), slowest)
                    times = {name_of(config): us for us, config in timed}
                    row = Timed(kernel, gemm, floors[read], times, default_us, others_us[m])
                    results.append(row)
                    share = f"{floors[read] / best_us:.0%} of the floor"
                    ratios = [f"{us / best_us:.2f} x {o}" for o, us in others_us[m].items()]
                    text = ", ".join([f"{best_us:.2f} us", share, *ratios])
                    say(f"{kernel} {m}x{n}x{k} {text}: {best}")
            if out is not None:
                save(results, out)
    return results


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def report(results: Sequence[Timed]) -> None:
    say("| kernel | M | shapes | % of floor | least | the default loses |")
    say("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kernel, m in dict.fromkeys((row.kernel, row.gemm.m) for row in results):
        rows = [row for row in results if (row.kernel, row.gemm.m) == (kernel, m)]
        shares = [row.floor_us / row.best_us for row in rows]
        lost = geometric_mean([row.default_us / row.best_us for row in rows]) - 1
        say(
            f"| {kernel} | {m} | {len(rows)} | {100 * geometric_mean(shares):.1f} "
            f"| {100 * min(shares):.1f} | {lost:.1%} |"
        )


def report_others(results: Sequence[Timed]) -> None:
    """Print how many times as fast as each other kernel every kernel is."""
    say("| kernel | M | shapes | compared with | times as fast | least |")
    say("| --- | ---: | ---: | --- | ---: | ---: |")
    for kernel, m in dict.fromkeys((row.kernel, row.gemm.m) for row in results):
        rows = [row for row in results if (row.kernel, row.gemm.m) == (kernel, m)]
        for other in rows[0].others_us:
            ratios = [row.others_us[other] / row.best_us for row in rows]
            mean, least = geometric_mean(ratios), min(ratios)
            say(f"| {kernel} | {m} | {len(rows)} | {other} | {mean:.2f} | {least:.2f} |")


def given_shapes(text: str) -> list[tuple[int, int]]:
    """N and K of "4096x14336,8192x8192". Raises ValueError on anything else."""
    pairs = [shape.split("x") for shape in text.split(",")]
    return [(int(n), int(k)) for n, k in pairs]


def save(results: Sequence[Timed], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in {row.kernel for row in results}:
        rows = [
            [row.gemm.m, row.gemm.n, row.gemm.k, config, us]
            for row in results
            if row.kernel == kernel
            for config, us in row.us.items()
        ]
        write_times(folder / f"{kernel}.json.gz", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--m", default="1,4,8")
    parser.add_argument("--suite", default="paper-fig10")
    parser.add_argument("--shapes", type=given_shapes)
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--against", default="")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sizes = given.shapes or [(shape.n, shape.k) for shape in load_suite(given.suite).shapes]
    sizes = list(dict.fromkeys([*sizes, *random_shapes(given.drawn, given.seed)]))
    kernels, tokens = given.kernels.split(","), parse_ranges(given.m)
    others = [other for other in given.against.split(",") if other]
    results = measure(kernels, tokens, sizes, given.seconds, given.out, others)
    report(results)
    if others:
        report_others(results)
