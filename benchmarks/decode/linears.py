"""Times of every configuration of each linear layer within decode steps, as for the tuner.

    python benchmarks/decode/linears.py --model llama-13b --scheme fp16 --batch 1

A step consists of the first blocks of a model with synthetic weights. Layers are tuned one by one,
the largest first, and each then uses its fastest configuration. Prints the time that each
configuration adds to a block in comparison with the fastest.
"""

from __future__ import annotations

import argparse

import torch
from json_lines import say

from flexq_bench.decode.case import open_model
from flexq_bench.decode.loading import load
from flexq_bench.decode.tuning import first_blocks, step_us
from flexq_bench.kernels.contract import Config, LinearKernel
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.errors import KernelError
from flexq_bench.workloads.gemm import GemmWorkload

_CAPACITY, _ROUNDS = 32, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--scheme", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    chosen: dict[tuple[str, int, int, int], Config | None] = {}

    def choose(kernel: LinearKernel, m: int, n: int, k: int) -> Config | None:
        key = (kernel.spec.label, m, n, k)
        return chosen[key] if key in chosen else kernel.default_config(GemmWorkload(m, n, k))

    batch, operations = given.batch, CudaOperations()
    source, device = open_model(given.model, given.scheme, 0), torch.device("cuda")
    model = first_blocks(load(source, device, _CAPACITY, choose, (batch,)))
    block = model.blocks[0]
    for linear in sorted(block.linears, key=lambda linear: -linear.nbytes):
        kernel, n, k = linear.kernel, linear.weights.rows, linear.weights.k
        key = (kernel.spec.label, batch, n, k)
        x = kernel.empty_activation(batch, k, device)
        timed: list[tuple[float, Config]] = []
        for config in kernel.candidates(GemmWorkload(batch, n, k)):
            if kernel.packing(x, config) is None:
                continue
            chosen[key] = config
            try:
                times = [step_us(model, operations, choose, batch) for _ in range(_ROUNDS)]
            except KernelError as error:
                say(f"  {config.as_dict()}: {error}")
                continue
            timed.append((sorted(times)[_ROUNDS // 2], config))
        timed.sort(key=lambda pair: pair[0])
        fastest, chosen[key] = timed[0]
        say(f"{linear.name} {kernel.spec.label} {batch}x{n}x{k}: {fastest:.1f} us a step")
        for microseconds, config in timed:
            say(f"  +{(microseconds - fastest) / len(model.blocks):.2f} us {config.as_dict()}")


if __name__ == "__main__":
    main()
