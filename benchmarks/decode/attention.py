"""Time of a decode step's attention alone, by batch, length and width of the KV cache.

    python benchmarks/decode/attention.py --model llama-13b --batch 1,4,8 --length 527,1024

One CUDA graph contains the attention of many layers, one after the other. cold: each layer has its
own cache, and together they exceed the L2 cache. hot: all layers share one cache. gb_per_s counts
the bytes of earlier tokens' keys and values, with their scales.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from contents import fill_randomly
from json_lines import say_row

from flexq_bench.decode.architecture import of_catalog
from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.decoder import AttentionShape, Destination
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.kv import KvLayer, empty_layer, token_bytes
from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.models import get_model

_MIN_LAYERS, _MAX_LAYERS, _COLD_BYTES, _REPLAYS = 8, 40, 2**29, 9
_DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--kernel", default="flexq", help="of the layer that comes next")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--length", default="527,1024")
    parser.add_argument("--kv-bits", default="16,8,4")
    arguments = parser.parse_args()
    for batch in (int(b) for b in arguments.batch.split(",")):
        for length in (int(length) for length in arguments.length.split(",")):
            for bits in (int(b) for b in arguments.kv_bits.split(",")):
                row = measured(arguments.model, arguments.kernel, batch, length, bits)
                say_row(row)


def measured(model: str, label: str, batch: int, length: int, bits: int) -> dict[str, object]:
    """The row of one case. length: tokens of a sequence, the new one included."""
    of_model = of_catalog(get_model(model)).dimensions
    heads, kv_heads, head_dim = of_model.heads, of_model.kv_heads, of_model.head_dim
    angles = torch.rand(length, head_dim // 2, device=_DEVICE)
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    shape = AttentionShape(heads, kv_heads, head_dim, table)
    kernel = resolve(label, "cuda")
    assert isinstance(kernel, LinearKernel)
    packed = kernel.empty_activation(batch, heads * head_dim, _DEVICE)
    to = Destination(kernel, packed, None)
    qkv = torch.randn(batch, shape.width, device=_DEVICE).half()
    positions = torch.full((batch,), length - 1, dtype=torch.int32, device=_DEVICE)
    read = batch * (length - 1) * kv_heads * 2 * token_bytes(head_dim, bits)
    layers = min(max(_MIN_LAYERS, -(-_COLD_BYTES // read)), _MAX_LAYERS)
    caches = [empty_layer(batch, kv_heads, length, head_dim, bits, _DEVICE) for _ in range(layers)]
    fill_randomly(caches, head_dim)
    operations = CudaOperations()

    def attend(over: list[KvLayer]) -> None:
        for cache in over:
            operations.attend(qkv, shape, cache, positions, length, to)

    cold = _per_layer_us(lambda: attend(caches), layers)
    hot = _per_layer_us(lambda: attend([caches[0]] * layers), layers)
    return {
        "model": model,
        "batch": batch,
        "length": length,
        "kv_bits": bits,
        "cold_us": round(cold, 2),
        "hot_us": round(hot, 2),
        "gb_per_s": round(read / cold / 1e3),
    }


def _per_layer_us(attend: Callable[[], None], layers: int) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        attend()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        attend()
    times = []
    for _ in range(_REPLAYS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)))
    return statistics.median(times) * 1000 / layers


if __name__ == "__main__":
    main()
