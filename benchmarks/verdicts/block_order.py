"""Effect of the state of the hardware's block scheduler on a kernel's speed.

    python benchmarks/verdicts/block_order.py set --out FOLDER [--cases KEY,KEY]
    python benchmarks/verdicts/block_order.py shuffle --out FOLDER [--cases KEY,KEY]

Needs a GPU. `set`: buffers and graph of a case are the same throughout. Between two batches of
samples one of these runs: nothing, a kernel of few blocks, a kernel of many blocks, or a kernel
that sets the order in which SMs get blocks (kernels/cuda/block_order.py) after one that left a
random order. Prints the median of each batch, in microseconds per launch, and their differences.

`shuffle`: batches as the protocol takes them, without and with a random block order before each
sample. Prints the mean, and the standard deviations of samples within a batch, of the means of
batches within a placement, and of the means of placements.

Writes set.jsonl or shuffle.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flexq_bench.kernels.cuda.block_order import BlockOrders, BlockShuffle
from flexq_bench.measure import Meter
from flexq_bench.measure.buffers import Buffers
from flexq_bench.measure.clocks import BetweenSamples, CudaClock, Rotation
from flexq_bench.measure.prepared import PreparedCase
from flexq_bench.measure.tuning import Tuning
from flexq_bench.workloads.case import Case

SET_CASES = (
    "cublaslt-w8a8 gemm cold m4n10240k8192",
    "cublas-fp16 gemm cold m1n10240k8192",
    "cublaslt-fp8 gemm cold m256n10240k8192",
    "flexq gemm cold m1n28672k8192",
)
SHUFFLE_CASES = (
    "cublas-fp16 gemm cold m4n19968k6656",
    "cublas-fp16 gemm cold m4n28672k8192",
    "cublas-fp16 gemm cold m64n7168k7168",
    "cublaslt-w8a8 gemm cold m4n4096k4096",
    "cublaslt-w8a8 gemm cold m32n19968k6656",
    "cublaslt-fp8 gemm cold m256n19968k6656",
    "cublaslt-fp8 gemm cold m512n11008k4096",
    "flexq gemm cold m4n4096k4096",
    "flexq gemm cold m1n19968k6656",
    "flexq gemm cold m256n7168k7168",
    "flexq gemm cold m512n7168k7168",
)
BATCHES, SAMPLES, ORDERS = 12, 4, 6
PLACEMENTS, BATCHES_EACH = 4, 10
_FILLED = 1 << 30  # bytes: a kernel of more blocks than fit at once
_GAP, _BATCH_US = 2.0, 10_000.0  # in lengths of a sample; with its gaps
Between = Callable[[], None]
Placed = list[list[list[float]]]  # samples by placement and batch


class _Unchanged(BetweenSamples):
    """The launches of buffers whose contents stay as they are."""

    def __init__(self, buffers: Buffers) -> None:
        self._of = buffers.between

    def begin_launches(self, count: int) -> None:
        self._of.begin_launches(count)


def medians(rotation: Rotation, between: Between, batches: int) -> list[float]:
    """Microseconds a launch of each batch, under steady load: nothing else sets a block order."""
    rotation.sample(SAMPLES, gap_us=None)
    times = []
    for _ in range(batches):
        between()
        torch.cuda.synchronize()
        times.append(round(rotation.sample(SAMPLES, gap_us=None).median_us, 3))
    return times


def set_orders(prepared: PreparedCase, meter: Meter) -> dict[str, list[float]]:
    """Medians of batches, by what ran between them."""
    device = meter.torch_device
    clock = CudaClock(device)
    orders, cell = BlockOrders(ORDERS, device), torch.zeros(1, device=device)

    def fill() -> None:
        torch.empty(_FILLED, dtype=torch.uint8, device=device).zero_()

    def one_block() -> None:
        cell.add_(1)

    def order(index: int) -> Between:
        def fill_and_set() -> None:
            fill()
            orders.set(index)

        return fill_and_set

    with prepared.placed(0) as placed:
        buffers = placed.buffers
        rotation = clock.rotation(
            buffers.bound(placed.config), buffers.copies, meter.protocol, _Unchanged(buffers)
        )
        try:
            times = {
                "nothing": medians(rotation, lambda: None, BATCHES),
                "a kernel of one block": medians(rotation, one_block, BATCHES),
                "a kernel that fills 1 GiB": medians(rotation, fill, BATCHES),
            }
            for index in range(ORDERS):
                times[f"the same, then order {index}"] = medians(rotation, order(index), BATCHES)
        finally:
            rotation.close()
    return times


def shuffled(prepared: PreparedCase) -> dict[str, Placed]:
    """Samples in microseconds a launch, without and with a random block order before each."""
    measured: dict[str, Placed] = {"without": [], "with": []}
    for placement in range(PLACEMENTS):
        with prepared.placed(placement) as placed:
            rotation = placed.rotation
            sample_us = rotation.sample(SAMPLES).median_us * rotation.launches
            count = max(3, round(_BATCH_US / ((1 + _GAP) * sample_us)))
            rotation.sample(count, gap_us=_GAP * sample_us)
            for kind, batches in measured.items():
                with ExitStack() as stack:
                    if kind == "without":
                        stack.enter_context(mock.patch.object(BlockShuffle, "run"))
                    batches.append(
                        [
                            [*rotation.sample(count, gap_us=_GAP * sample_us).times_us]
                            for _ in range(BATCHES_EACH)
                        ]
                    )
    return measured


def deviations(placements: Placed) -> tuple[float, float, float, float]:
    """Mean; standard deviations of samples, batches and placements as fractions of it."""
    means = [[statistics.fmean(batch) for batch in batches] for batches in placements]
    mean = statistics.fmean(map(statistics.fmean, means))
    within = (statistics.variance(batch) for batches in placements for batch in batches)
    squares = (
        statistics.fmean(within),
        statistics.fmean(map(statistics.variance, means)),
        statistics.variance(map(statistics.fmean, means)),
    )
    sample, batch, placement = (math.sqrt(square) / mean for square in squares)
    return mean, sample, batch, placement


def show_set(key: str, measured: dict[str, list[float]]) -> Iterator[str]:
    yield key
    for between, times in measured.items():
        spread = 100 * statistics.pstdev(times) / statistics.mean(times)
        shown = " ".join(f"{time:.2f}" for time in times)
        yield f"  {between:28} sd {spread:4.1f} %  {shown}"


def show_shuffled(key: str, measured: dict[str, Placed]) -> Iterator[str]:
    label, shape = key.split()[0], key.split()[-1]
    cells = [label, shape]
    for placements in measured.values():
        mean, *sigmas = deviations(placements)
        cells += [f"{mean:.2f}", *(f"{100 * sigma:.2f} %" for sigma in sigmas)]
    yield f"| {' | '.join(cells)} |"


def measure(part: str, keys: Sequence[str], out: Path) -> None:
    """Measure the cases, write a line for each and print it."""
    meter = Meter("cuda:0", tuning=Tuning.NONE)
    show: Callable[[str, Any], Iterator[str]] = show_set if part == "set" else show_shuffled
    with (out / f"{part}.jsonl").open("w", encoding="utf-8") as lines:
        for key in keys:
            with meter.device_guard():
                prepared = meter.prepare(Case.from_key(key))
                assert isinstance(prepared, PreparedCase)  # of one GPU
                prepared.use_default()
                measured = set_orders(prepared, meter) if part == "set" else shuffled(prepared)
            lines.write(json.dumps({"case": key, "gpu": meter.device_info.sku, **measured}) + "\n")
            sys.stdout.write("".join(f"{line}\n" for line in show(key, measured)))
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=("set", "shuffle"))
    parser.add_argument("--cases")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cases = SET_CASES if options.part == "set" else SHUFFLE_CASES
    measure(options.part, options.cases.split(",") if options.cases else cases, options.out)


if __name__ == "__main__":
    main()
