"""A decode worker: a process that loads a model and decodes on request.

python -m flexq_bench.decode.worker --device cuda --seed 0
"""

from __future__ import annotations

import argparse
import gc
import sys

import torch

from flexq_bench.decode.operations import DecodeWorkerOperations
from flexq_bench.measure.device import find_device
from flexq_bench.measure.rank_options import add_rank_options, joined
from flexq_bench.measure.worker_server import end_process, own_pipes, serve

MODULE = "flexq_bench.decode.worker"
COMMAND = (sys.executable, "-m", MODULE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seed", type=int, default=0)
    add_rank_options(parser)
    options = parser.parse_args()
    requests, replies = own_pipes()
    device = find_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    operations = DecodeWorkerOperations(options.device, options.seed, joined(options, device))
    gc.freeze()  # excludes imported modules from garbage collection, which makes it faster
    serve(operations, requests, replies, operations.OPERATIONS)


if __name__ == "__main__":
    main()
    end_process()
