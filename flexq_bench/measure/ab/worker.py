"""An A/B worker process: measures with the code of the tree that it was started in.

    python -m flexq_bench.measure.ab.worker --device cuda --seed 0

Requests come on stdin, replies go to stdout (see flexq_bench.measure.worker_messages); everything
else goes to stderr. It uses the device from the first request on, and ends at the end of stdin.
"""

from __future__ import annotations

import argparse
from typing import BinaryIO

from flexq_bench.kernels.autotune import TuningMemory
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure.ab.operations import WorkerOperations
from flexq_bench.measure.external_kernels import OPTION
from flexq_bench.measure.external_loader import add_kernels, add_option
from flexq_bench.measure.process_limits import limit_memory
from flexq_bench.measure.rank_worker import COMMAND
from flexq_bench.measure.worker_server import end_process, own_pipes, serve

OPERATIONS = (
    *("describe", "reseed", "memory", "prepare", "place", "turn", "leave", "release"),
    "launch_again",
    # for a judge, which has inputs of its own
    *("hold", "fill", "output", "inspect", "quantize", "draw", "judge"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuning", type=Tuning, help="where choices are kept; none: not timed")
    add_option(parser)
    options = parser.parse_args()
    requests, replies = own_pipes()
    # Others may be measuring when this process starts. Imports don't disturb them, but all that
    # follows uses the device or runs external code.
    if not requests.peek(1):
        return
    if options.kernels_from:
        limit_memory(options.device)
    add_kernels(options.kernels_from)
    _measure(options, requests, replies)


def _measure(options: argparse.Namespace, requests: BinaryIO, replies: BinaryIO) -> None:
    # A separate frame, because imported code may keep the frames that call it.
    tuning = options.tuning or Tuning.REMEMBERED
    ranks = (*COMMAND, *(part for source in options.kernels_from for part in (OPTION, source)))
    meter = Meter(options.device, seed=options.seed, tuning=tuning, rank_command=ranks)
    memory = TuningMemory() if options.tuning is None else meter.choices
    with meter.device_guard():
        serve(WorkerOperations(meter, memory), requests, replies, OPERATIONS)


if __name__ == "__main__":
    main()
    end_process()
