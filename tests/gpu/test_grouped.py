"""Linear layers of experts on a GPU: exact sums with all configurations and any routing."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.cuda.grouped.gemm import GroupedConfig, configs_for, grouped_gemm
from flexq_bench.kernels.cuda.grouped.packing import EIGHT, FOUR, SIX, ExpertFormat, pack_experts

DEVICE = torch.device("cuda")
GROUP = 128
# Whole tiles; a last tile of K with two MMAs; rows of less than a tile; K that TMA can't take.
SHAPES = ((192, 256), (176, 704), (40, 300), (513, 96))
ROUTINGS = (
    (0, 1, 0, 3, 8),
    (0, 0, 0, 0, 0),
    (17, 0, 33, 1, 0),
    (300, 0, 1, 65, 130),
)


def drawn_weights(
    fmt: ExpertFormat, experts: int, n: int, k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks, and the integer weights float64 [experts, N, K] that they stand for."""
    groups = -(-k // GROUP)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (experts, *shape), generator=generator, device=DEVICE)

    def wide(of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(GROUP, dim=2)[..., :k]

    if fmt is EIGHT:
        codes = integers(-128, 128, n, k)
        return pack_experts(codes.to(torch.int8)), codes.double()
    if fmt is SIX:
        codes, scales = integers(-31, 32, n, k), integers(1, 5, n, groups)
        return pack_experts(codes.to(torch.int8), scales.half()), (codes * wide(scales)).double()
    codes, scales = integers(0, 16, n, k), integers(1, 9, n, groups)
    zeros = integers(-15, 1, n, groups)
    packed = pack_experts(codes.to(torch.int8), scales.half(), zeros.to(torch.int8))
    return packed, ((codes + wide(zeros)) * wide(scales)).double()


def check(
    fmt: ExpertFormat, config: GroupedConfig, n: int, k: int, sizes: tuple[int, ...], apart: int
) -> None:
    """Compare every bit of two launches with exact sums, and rows without tokens with NaN."""
    generator = torch.Generator(DEVICE).manual_seed(n * k + sum(sizes))
    experts = len(sizes)
    chunks, weights = drawn_weights(fmt, experts, n, k, generator)
    rows = experts * apart if apart else max(1, sum(sizes))
    codes = torch.randint(
        -128, 128, (rows, k), generator=generator, device=DEVICE, dtype=torch.int8
    )
    scales = torch.rand(rows, generator=generator, device=DEVICE) * 1e-2
    features = (torch.rand(experts, n, generator=generator, device=DEVICE) * 1e-3).half()
    expected = torch.full((rows, n), torch.nan, device=DEVICE).half()
    first = 0
    for expert, size in enumerate(sizes):
        first = expert * apart if apart else first
        at = slice(first, first + size)
        sums = (codes[at].double() @ weights[expert].T).float()
        expected[at] = (sums * features[expert].float() * scales[at, None]).half()
        first += size
    of_device = torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        y = torch.full_like(expected, torch.nan)
        grouped_gemm(fmt, config, codes, scales, chunks, features, of_device, y, rows_apart=apart)
        assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), (config, sizes)


@pytest.mark.parametrize("fmt", [SIX, FOUR, EIGHT], ids=["w6", "w4", "w8"])
@pytest.mark.parametrize("sizes", ROUTINGS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_sums_of_every_configuration_are_exact(fmt, sizes, n, k):
    for config in configs_for(fmt, {"experts": len(sizes), "tokens": 300}):
        check(fmt, config, n, k, sizes, 0)
        check(fmt, config, n, k, sizes, max(1, *sizes))


def test_changed_routing_counts_in_a_captured_graph():
    generator = torch.Generator(DEVICE).manual_seed(1)
    chunks, _ = drawn_weights(SIX, 4, 64, 256, generator)
    config = configs_for(SIX, {"experts": 4, "tokens": 8})[0]
    codes = torch.randint(-128, 128, (8, 256), generator=generator, device=DEVICE).to(torch.int8)
    scales, features = torch.ones(8, device=DEVICE), torch.ones(4, 64, device=DEVICE).half() / 4096
    sizes = torch.tensor([2, 0, 5, 1], dtype=torch.int32, device=DEVICE)
    y, direct = torch.empty(8, 64, device=DEVICE).half(), torch.empty(8, 64, device=DEVICE).half()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(SIX, config, codes, scales, chunks, features, sizes, y)
    for routing in ([2, 0, 5, 1], [0, 8, 0, 0], [1, 1, 1, 5]):
        sizes.copy_(torch.tensor(routing))
        graph.replay()
        grouped_gemm(SIX, config, codes, scales, chunks, features, sizes, direct)
        assert torch.equal(y, direct)
