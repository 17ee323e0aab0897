"""Launches what stands between a decoder's layers, for compute-sanitizer to see.

compute-sanitizer --tool memcheck python tests/gpu/launch_operations.py

With --few-tokens without the kernel of experts for many tokens: racecheck misses the order of its
reads (csrc/grouped/many_tokens.cu).
"""

from __future__ import annotations

import sys

import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.cuda.grouped.gemm import FewConfig, candidates, grouped_gemm
from flexq_bench.kernels.cuda.grouped.packing import EIGHT, FLEXQ, FOUR, SIX, packed_bytes
from flexq_bench.kernels.decoder import AttentionShape, Destination, Norm
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.kv import KV_BITS, empty_layer
from flexq_bench.kernels.registry import resolve

DEVICE = torch.device("cuda")
KERNELS = ("fp16", "flexq", "cublaslt-w8a8")  # one that takes each packing
# Heads, KV heads, values of a head: sums of one block and of a cluster, padded MMAs.
HEADS = ((4, 4, 128), (8, 1, 128), (2, 2, 80), (6, 2, 8))
# Positions of new tokens: no earlier ones, some, one past the last split's turn.
POSITIONS = (0, 63, 64, 300)


def launch_attention(kernel: LinearKernel, heads: int, kv_heads: int, head_dim: int) -> None:
    table = torch.rand(400, head_dim // 2, 2, device=DEVICE)
    shape = AttentionShape(heads, kv_heads, head_dim, table)
    positions = torch.tensor(POSITIONS, dtype=torch.int32, device=DEVICE)
    qkv = torch.randn(len(POSITIONS), shape.width, device=DEVICE).half()
    to = Destination(
        kernel, kernel.empty_activation(len(POSITIONS), heads * head_dim, DEVICE), None
    )
    for bits in KV_BITS:
        cache = empty_layer(len(POSITIONS), kv_heads, 301, head_dim, bits, DEVICE)
        CudaOperations().attend(qkv, shape, cache, positions, 301, to)


def launch_rows(kernel: LinearKernel, m: int, k: int) -> None:
    operations = CudaOperations()
    to = Destination(kernel, kernel.empty_activation(m, k, DEVICE), None)
    x, wide = (torch.randn(m, width, device=DEVICE).half() for width in (k, 2 * k))
    weight = torch.rand(k, device=DEVICE).half()
    for bias in (None, weight):
        operations.norm(x, x, Norm(weight, bias, 1e-5), to)
    operations.silu_mul(wide, to)
    operations.relu(x, to)


def launch_experts(*, few_tokens: bool) -> None:
    """Linear layers of experts in all configurations: whole tiles, parts of tiles, no rows."""
    for fmt in (SIX, FOUR, EIGHT, FLEXQ):
        for n, k in ((176, 704), (40, 304)):
            of_bytes = 60 if fmt is FLEXQ else 256  # two are a scale below 1
            chunks = torch.randint(0, of_bytes, (4, packed_bytes(fmt, n, k)), device=DEVICE).byte()
            # Sums of any bytes fit FP16.
            features, scales = (
                torch.rand(4, n, device=DEVICE).half() / 1024,
                torch.rand(100, device=DEVICE),
            )
            if fmt is FLEXQ:
                scales = torch.rand(100, -(-k // 128), device=DEVICE).half()
            codes = torch.randint(-128, 128, (100, k), device=DEVICE).to(torch.int8)
            sizes = torch.tensor((3, 0, 17, 80), dtype=torch.int32, device=DEVICE)
            for config in candidates(fmt, 4, 80):
                if few_tokens and not isinstance(config, FewConfig):
                    continue
                y = torch.full((100, n), torch.nan, device=DEVICE).half()
                grouped_gemm(fmt, config, codes, scales, chunks, features, sizes, y)
                assert bool(torch.isfinite(y).all())


def main() -> None:
    if torch.cuda.get_device_capability() >= (9, 0):
        launch_experts(few_tokens="--few-tokens" in sys.argv)
    for label in KERNELS:
        kernel = resolve(label, "cuda")
        assert isinstance(kernel, LinearKernel)
        for heads in HEADS:
            launch_attention(kernel, *heads)
        for m, k in ((1, 5120), (3, 172), (40, 1536)):
            launch_rows(kernel, m, k)
    tokens, positions = (torch.zeros(3, dtype=torch.int32, device=DEVICE) for _ in range(2))
    history = torch.zeros(3, 9, dtype=torch.int64, device=DEVICE)
    logits = torch.randn(3, 1003, device=DEVICE).half()
    CudaOperations().pick(logits, tokens, positions, history)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
