"""A process that measures cases on one device on request.

    python -m flexq_bench.runs.meter_worker --device cpu --seed 0 --kernels-from =/path/FILE.py

Kernels from outside run here and not in the process that stores results, because they may exit,
hang or use all memory. The protocol is that of flexq_bench.measure.worker_messages.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, BinaryIO

from flexq_bench.errors import MeasureError
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure.external_loader import add_kernels, add_option
from flexq_bench.measure.process_limits import limit_memory
from flexq_bench.measure.worker_server import end_process, own_pipes, serve
from flexq_bench.runs.worker import measure_case, worker_of
from flexq_bench.workloads.case import Case

MODULE = "flexq_bench.runs.meter_worker"


class MeterOperations:
    """The operations that `flexq_bench.runs.process_meter` calls in the process."""

    OPERATIONS = ("describe", "memory_obstacles", "measure")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def describe(self) -> dict[str, Any]:
        """Describe this process as a worker."""
        return {**asdict(worker_of(self._meter)), "backend": self._meter.backend}

    def memory_obstacles(self, case: str) -> dict[str, Any]:
        """The reason why a case doesn't fit the free memory; empty: it fits."""
        try:
            self._meter.check_memory(Case.from_key(case))
        except MeasureError as error:
            return {"reason": str(error)}
        return {"reason": ""}

    def measure(self, case: str) -> dict[str, Any]:
        """Measure a case; returns a Measured as plain values."""
        return asdict(measure_case(self._meter, Case.from_key(case)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuning", type=Tuning, default=Tuning.REMEMBERED)
    add_option(parser)
    options = parser.parse_args()
    requests, replies = own_pipes()
    limit_memory(options.device)
    add_kernels(options.kernels_from)
    _measure(options, requests, replies)


def _measure(options: argparse.Namespace, requests: BinaryIO, replies: BinaryIO) -> None:
    # In a separate function, because imported code can keep a reference to its caller's frame.
    meter = Meter(options.device, seed=options.seed, tuning=options.tuning)
    serve(MeterOperations(meter), requests, replies, MeterOperations.OPERATIONS)


if __name__ == "__main__":
    main()
    end_process()
