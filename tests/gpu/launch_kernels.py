"""Launches the kernels named in the arguments in every configuration, for compute-sanitizer to see.

compute-sanitizer --tool memcheck python tests/gpu/launch_kernels.py flexq-w6a6 cublaslt-w8a8

With --own only in those that launch a kernel of ours: not in a library's.
"""

from __future__ import annotations

import argparse
import sys

import torch

from flexq_bench.kernels.contract import LinearKernel, Probe
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.gemm import GemmWorkload

# A few tokens, some, many, hundreds: each has configurations of its own. N and K end inside a tile.
# The last two have K long enough for blocks to share outputs. So have 20 tokens, which are in the
# order of warpgroup MMA on Hopper where K is long.
SHAPES = (
    (3, 100, 1111),
    (17, 40, 576),
    (20, 72, 4300),
    (70, 264, 576),
    (260, 72, 300),
    (40, 264, 1300),
    (130, 264, 1100),
)


def launch_linear(kernel: LinearKernel, gemm: GemmWorkload, own: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(gemm.m)
    real = torch.randn(gemm.m, gemm.k, generator=generator, device="cuda")
    weight = torch.randn(gemm.n, gemm.k, generator=generator, device="cuda")
    x = real.half()
    w = kernel.pack_weight(kernel.quantize_weight(weight.half()))
    packed = kernel.pack_activation(kernel.quantize_activation(x))
    bias = torch.randn(gemm.n, generator=generator, device="cuda").half()
    launched = [
        config
        for config in (None, *kernel.candidates(gemm))
        if not own or kernel.builds_for(gemm, config)
    ]
    for config in launched:
        out = torch.full((gemm.m, gemm.n), torch.nan, dtype=torch.float16, device="cuda")
        kernel.gemm(packed, w, out, bias=bias, config=config)
        assert bool(torch.isfinite(out).all()), f"{kernel.spec.label} left outputs unwritten"
    if None in launched:
        kernel.linear(x, kernel.empty_activation(gemm.m, gemm.k, x.device), w, out)
    torch.cuda.synchronize()


def launch_probe(probe: Probe, gemm: GemmWorkload) -> None:
    operand = probe.allocate(gemm, torch.device("cuda"), seed=0)
    for config in (None, *probe.candidates(gemm)):
        probe.launch(operand, config)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("labels", nargs="+")
    parser.add_argument("--own", action="store_true")
    arguments = parser.parse_args()
    for label in arguments.labels:
        kernel = resolve(label, "cuda")
        for shape in SHAPES:
            try:
                if isinstance(kernel, LinearKernel):
                    launch_linear(kernel, GemmWorkload(*shape), arguments.own)
                else:
                    launch_probe(kernel, GemmWorkload(*shape))
            except UnsupportedError as error:  # a library's answer to a shape
                sys.stdout.write(f"{label}: {error}\n")


if __name__ == "__main__":
    main()
