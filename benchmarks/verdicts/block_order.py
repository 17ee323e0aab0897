"""Effect of the state of the hardware's block distribution on a kernel's speed.

    python benchmarks/verdicts/block_order.py [--cases KEY,KEY] --out FOLDER

Needs a GPU. Buffers and graph of a case are the same throughout. Between two batches of samples one
of these runs: nothing, a kernel of few blocks, a kernel of many blocks, or a kernel that sets the
order in which SMs get blocks (kernels/cuda/block_order.py) after one that left a random order.
Prints the median of each batch, in microseconds per launch, and their differences. Writes
block_order.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from flexq_bench.measure import Meter
from flexq_bench.measure.buffers import Buffers
from flexq_bench.measure.clocks import BetweenSamples, CudaClock, Rotation
from flexq_bench.measure.prepared import PreparedCase
from flexq_bench.measure.tuning import Tuning
from kernels.cuda.block_order import BlockOrders
from workloads.case import Case

CASES = (
    "cublaslt-w8a8 gemm cold m4n10240k8192",
    "cublas-fp16 gemm cold m1n10240k8192",
    "cublaslt-fp8 gemm cold m256n10240k8192",
    "flexq gemm cold m1n28672k8192",
)
BATCHES, SAMPLES, ORDERS = 12, 4, 6
_FILLED = 1 << 30  # bytes: a kernel of more blocks than fit at once
Between = Callable[[], None]


class _Unchanged(BetweenSamples):
    """The launches of buffers whose contents stay as they are."""

    def __init__(self, buffers: Buffers) -> None:
        self._of = buffers.between

    def begin_launches(self, count: int) -> None:
        self._of.begin_launches(count)


def medians(rotation: Rotation, between: Between, batches: int) -> list[float]:
    """Microseconds a launch of each batch."""
    rotation.sample(SAMPLES)
    times = []
    for _ in range(batches):
        between()
        torch.cuda.synchronize()
        times.append(round(rotation.sample(SAMPLES).median_us, 3))
    return times


def measure(prepared: PreparedCase, clock: CudaClock, meter: Meter) -> dict[str, list[float]]:
    """Medians of batches, by what ran between them."""
    device = meter.torch_device
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
            found = {
                "nothing": medians(rotation, lambda: None, BATCHES),
                "a kernel of one block": medians(rotation, one_block, BATCHES),
                "a kernel that fills 1 GiB": medians(rotation, fill, BATCHES),
            }
            for index in range(ORDERS):
                found[f"the same, then order {index}"] = medians(rotation, order(index), BATCHES)
        finally:
            rotation.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    meter = Meter("cuda:0", tuning=Tuning.NONE)
    clock = CudaClock(meter.torch_device)
    with (options.out / "block_order.jsonl").open("w", encoding="utf-8") as lines:
        for key in options.cases.split(","):
            with meter.device_guard():
                prepared = meter.prepare(Case.from_key(key))
                prepared.use_default()
                found = measure(prepared, clock, meter)
            lines.write(json.dumps({"case": key, "gpu": meter.device_info.sku, **found}) + "\n")
            sys.stdout.write(f"{key}\n")
            for between, times in found.items():
                spread = 100 * statistics.pstdev(times) / statistics.mean(times)
                shown = " ".join(f"{time:.2f}" for time in times)
                sys.stdout.write(f"  {between:28} sd {spread:4.1f} %  {shown}\n")


if __name__ == "__main__":
    main()
