"""Times of linear layers of experts, all configurations, against the read floor; of whole layers.

    python benchmarks/kernels/experts.py [--bits 6,4,flexq] [--tokens 1,8,64]
        [--drawn COUNT --seed N] [--experts 128 --top-k 8] [--shapes NxK,...]
        [--layer HIDDENxINTERMEDIATE] [--out FILE] [--peers humming,cublas]

Needs a Hopper GPU. Weights are random bytes and cold: launches of a captured graph route tokens to
other experts. For each shape it prints the bytes of the experts with tokens, the time of the
fastest read of as many bytes (read-6: one launch after the other, and overlapping), the fastest
configuration, its time, its share of the first floor, and the default configuration's loss.
--layer: also both linear layers of SwiGLU experts with routing, quantization and the weighted sum.
--drawn: further random shapes. --peers: also Humming's experts of the same bits; BF16 by cuBLASLt,
an expert after another, for row counts that the host knows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from heuristic import say

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.cuda.grouped.gemm import GroupedConfig, configs_for, grouped_gemm
from flexq_bench.kernels.cuda.grouped.layer import ExpertLayer, ExpertWeights
from flexq_bench.kernels.cuda.grouped.packing import (
    EIGHT,
    FLEXQ,
    FOUR,
    SIX,
    ExpertFormat,
    packed_bytes,
)
from flexq_bench.kernels.cuda.probes import ReadConfig, ReadWeights
from flexq_bench.kernels.external_packages import humming
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.kernels.runtime.module import compile_ahead

DEVICE = torch.device("cuda")
FORMATS = {"6": SIX, "4": FOUR, "8": EIGHT, "flexq": FLEXQ}
READS = (ReadConfig(2, 512, 8), ReadConfig(4, 512, 8), ReadConfig(2, 1024, 4))
COLD_BYTES = 1 << 30
HUMMING = {6: "humming-experts-w6a8", 4: "humming-experts-w4a8"}
Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A number of tokens and how many experts each is routed to."""

    tokens: int
    experts: int
    top_k: int

    def routings(self, count: int, seed: int) -> list[list[list[int]]]:
        """Experts of each token, for `count` launches; a single token gets new ones each time."""
        draw = random.Random(seed)
        order = draw.sample(range(self.experts), self.experts)
        if self.tokens == 1:
            at = range(self.top_k)
            return [
                [[order[(i * self.top_k + j) % self.experts] for j in at]] for i in range(count)
            ]
        return [
            [draw.sample(range(self.experts), self.top_k) for _ in range(self.tokens)]
            for _ in range(count)
        ]

    def sizes(self, routing: list[list[int]]) -> list[int]:
        """Rows of each expert."""
        flat = [expert for token in routing for expert in token]
        return [flat.count(expert) for expert in range(self.experts)]


def graph_us(launches: Sequence[Launch], repetitions: int = 7) -> float:
    """Microseconds of a launch in a graph of these: the median over replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
    times = []
    for _ in range(repetitions + 2):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return float(statistics.median(times[2:]))


class Pool:
    """Random bytes in which all weights lie."""

    def __init__(self) -> None:
        words = COLD_BYTES // 2
        self._words = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=DEVICE)

    def weights(self, size: int, first: int = 0) -> torch.Tensor:
        return self._words.view(torch.uint8)[first : first + size]

    def floor_us(self, size: int, bits: int, *, overlap: bool) -> float:
        """The fastest read of `size` bytes, from other memory in each of the launches."""
        probe, words = ReadWeights(NumberFormat(bits, 128), overlap=overlap), size // 16 * 4
        count = max(1, min(16, self._words.numel() // words))
        parts = [
            PackedOperand({"words": self._words[i * words : (i + 1) * words]}, 1, 1)
            for i in range(count)
        ]
        return min(
            graph_us([partial(probe.launch, part, config) for part in parts]) for config in READS
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations of launches: int8 codes, scales of rows, results; and the experts' row counts."""

    codes: torch.Tensor
    scales: torch.Tensor
    results: torch.Tensor
    sizes: Sequence[Sequence[int]]
    on_device: Sequence[torch.Tensor]


def humming_us(fmt: ExpertFormat, rows: Rows, n: int, k: int, copies: int) -> float:
    """Microseconds of Humming's experts of as many bits, with scales of 128 k."""
    kernel = next(d for d in humming.KERNELS if d.name == HUMMING[fmt.w_bits])
    experts, top = len(rows.sizes[0]), 2 ** (fmt.w_bits - 1) - 1
    codes = torch.randint(-top, top + 1, (experts, n, k), device=DEVICE, dtype=torch.int8)
    of_groups = torch.rand(experts, n, k // 128, device=DEVICE) * 1e-2 + 1e-3
    config, *tensors = kernel.prepare_weight(codes, of_groups, n=n, k=k, experts=experts)
    weights = [tensors] + [[t.clone() for t in tensors] for _ in range(copies - 1)]
    ends = [torch.nn.functional.pad(sizes.cumsum(0), (1, 0)) for sizes in rows.on_device]
    return graph_us(
        [
            partial(
                humming.multiply_codes,
                rows.codes,
                rows.scales[:, None],
                config,
                weights[i % copies][0],
                weights[i % copies][1:],
                rows.results,
                expert_layout=of_launch,
                compute_config={"gemm_type": "grouped_contiguous"},
            )
            for i, of_launch in enumerate(ends)
        ]
    )


def cublas_us(rows: Rows, n: int, k: int) -> float:
    """Microseconds of BF16 experts, one after another, by cuBLASLt."""
    experts = len(rows.sizes[0])
    copies = max(1, min(len(rows.sizes), COLD_BYTES // (2 * experts * n * k)))
    weights = torch.empty(copies, experts, n, k, device=DEVICE, dtype=torch.bfloat16).mT
    x = torch.randn(rows.codes.shape, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty(rows.results.shape, device=DEVICE, dtype=torch.bfloat16)

    def launch(sizes: Sequence[int], of_launch: torch.Tensor) -> None:
        first = 0
        for expert, size in enumerate(sizes):
            if size:
                at = slice(first, first + size)
                torch.mm(x[at], of_launch[expert], out=y[at])
            first += size

    return graph_us(
        [partial(launch, sizes, weights[i % copies]) for i, sizes in enumerate(rows.sizes)]
    )


def time_shape(
    pool: Pool, mixture: Mixture, fmt: ExpertFormat, n: int, k: int, *, peers: Sequence[str] = ()
) -> dict[str, Any]:
    """Time every configuration of a linear layer, and peers: "humming", "cublas"."""
    experts, rows = mixture.experts, mixture.tokens * mixture.top_k
    size = packed_bytes(fmt, n, k)
    copies = max(1, min(8, COLD_BYTES // 2 // (experts * size)))
    chunks = pool.weights(copies * experts * size).view(copies, experts, size)
    count = 16 if mixture.tokens == 1 else 4
    sizes = [mixture.sizes(routing) for routing in mixture.routings(count, 1)]
    on_device = [torch.tensor(s, dtype=torch.int32, device=DEVICE) for s in sizes]
    touched = sum(sum(map(bool, s)) for s in sizes) / count
    x = torch.randint(-128, 128, (rows, k), device=DEVICE).to(torch.int8)
    scales, features = torch.rand(rows, device=DEVICE), torch.rand(experts, n, device=DEVICE).half()
    if fmt is FLEXQ:
        scales = torch.rand(rows, -(-k // 128), device=DEVICE).half()
    y = torch.empty(rows, n, device=DEVICE, dtype=torch.float16)
    weights = n * k * fmt.w_bits // 8 + (0 if fmt is EIGHT else n * -(-k // 128) * 2)
    sizes_of_layer = {"tokens": mixture.tokens, "top_k": mixture.top_k, "n": n, "k": k}
    configs = configs_for(fmt, {"experts": experts, **sizes_of_layer})
    compile_ahead([config.build(fmt) for config in configs])

    def launches(config: GroupedConfig) -> list[Launch]:
        return [
            partial(
                grouped_gemm, fmt, config, x, scales, chunks[i % copies], features, on_device[i], y
            )
            for i in range(count)
        ]

    us = {repr(config): graph_us(launches(config)) for config in configs}
    of_rows, others = Rows(x, scales, y, sizes, on_device), {}
    if "humming" in peers:
        others["humming"] = humming_us(fmt, of_rows, n, k, copies)
    if "cublas" in peers:
        others["cublas"] = cublas_us(of_rows, n, k)
    return {
        "rows": rows,
        "others": others,
        "shape": f"{n}x{k}",
        "bits": fmt.w_bits,
        "tokens": mixture.tokens,
        "experts": experts,
        "touched": touched,
        "most": max(map(max, sizes)),
        "megabytes": touched * weights / 1e6,
        "floor_us": pool.floor_us(int(touched * weights), fmt.w_bits, overlap=False),
        "overlap_us": pool.floor_us(int(touched * weights), fmt.w_bits, overlap=True),
        "default": repr(configs[0]),
        "us": us,
    }


def time_layer(pool: Pool, mixture: Mixture, fmt: ExpertFormat, k: int, inner: int) -> float:
    """Microseconds of a whole layer with the default configurations."""
    experts, at, weights = mixture.experts, 0, []
    for n, of_k in ((2 * inner, k), (k, inner)):
        size = experts * packed_bytes(fmt, n, of_k)
        features = torch.rand(experts, n, device=DEVICE).half() / 1e4
        chunks = pool.weights(size, at).view(experts, -1)
        weights.append(ExpertWeights(fmt, chunks, features, of_k))
        at += size
    layer = ExpertLayer(weights[0], weights[1], mixture.tokens, mixture.top_k)
    x = torch.randn(mixture.tokens, k, device=DEVICE).half()
    shares = torch.rand(mixture.tokens, mixture.top_k, device=DEVICE)
    out = torch.empty_like(x)
    routings = mixture.routings(16 if mixture.tokens == 1 else 4, 2)
    chosen = [torch.tensor(routing, dtype=torch.int32, device=DEVICE) for routing in routings]
    return graph_us([partial(layer, x, of_launch, shares, out) for of_launch in chosen])


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    best = min(row["us"], key=row["us"].get)
    us, default = row["us"][best], row["us"][row["default"]]
    n, k = map(int, row["shape"].split("x"))
    others = "".join(f", {other} {took / us:.2f}x" for other, took in row["others"].items())
    return (
        f"{row['shape']} W{row['bits']} tokens {row['tokens']} touched {row['touched']:.0f} most "
        f"{row['most']}: {row['megabytes']:.0f} MB, floor {row['floor_us']:.1f} us (overlapping "
        f"{row['overlap_us']:.1f}), {best} {us:.1f} us, {100 * row['floor_us'] / us:.0f} % of the "
        f"floor, {2e-6 * row['rows'] * n * k / us:.0f} TOPS{others}; "
        f"default +{100 * (default / us - 1):.0f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", default="6,4")
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--shapes", default="1408x2816,2816x704,1536x2048,2048x768")
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layer", default="")
    parser.add_argument("--peers", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes.split(",") if shape]
    peers = [peer for peer in given.peers.split(",") if peer]
    units = (64, 128) if "humming" in peers else (16, 32)  # of which it takes multiples
    of_n, of_k = (512 // unit for unit in units)
    shapes += [
        (units[0] * draw.randint(of_n, 8 * of_n), units[1] * draw.randint(of_k, 8 * of_k))
        for _ in range(given.drawn)
    ]
    pool, rows = Pool(), []
    for bits in given.bits.split(","):
        for tokens in map(int, given.tokens.split(",")):
            mixture = Mixture(tokens, given.experts, given.top_k)
            for n, k in shapes:
                rows.append(time_shape(pool, mixture, FORMATS[bits], n, k, peers=peers))
                say(shown(rows[-1]))
            if given.layer:
                hidden, inner = map(int, given.layer.split("x"))
                us = time_layer(pool, mixture, FORMATS[bits], hidden, inner)
                say(f"layer {given.layer} W{bits} tokens {tokens}: {us:.1f} us")
                rows.append({"layer": given.layer, "bits": bits, "tokens": tokens, "us": us})
    if given.out:
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
