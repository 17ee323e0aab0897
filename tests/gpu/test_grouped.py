"""Linear layers of experts on a GPU: exact sums with all configurations and any routing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from flexq_bench.kernels.cuda.cublas.dense import Fp16Gemm
from flexq_bench.kernels.cuda.grouped.gemm import GroupedConfig, candidates, grouped_gemm
from flexq_bench.kernels.cuda.grouped.layer import ExpertLayer, ExpertWeights, choose_experts
from flexq_bench.kernels.cuda.grouped.packing import (
    EIGHT,
    FLEXQ,
    FOUR,
    SIX,
    ExpertFormat,
    pack_experts,
)
from flexq_bench.kernels.decoder import Destination, Norm
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.formats import NumberFormat, quantize

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
    fmt: ExpertFormat,
    config: GroupedConfig,
    n: int,
    k: int,
    sizes: tuple[int, ...],
    apart: int,
    dtype: torch.dtype = torch.float16,
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
    expected = torch.full((rows, n), torch.nan, device=DEVICE, dtype=dtype)
    first = 0
    for expert, size in enumerate(sizes):
        first = expert * apart if apart else first
        at = slice(first, first + size)
        sums = (codes[at].double() @ weights[expert].T).float()
        expected[at] = (sums * features[expert].float() * scales[at, None]).to(dtype)
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
    for config in candidates(fmt, len(sizes), 300):
        check(fmt, config, n, k, sizes, 0)
        check(fmt, config, n, k, sizes, max(1, *sizes), torch.bfloat16)


@pytest.mark.parametrize("sizes", ROUTINGS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_sums_of_groups_are_scaled_by_both_sides(sizes, n, k):
    generator = torch.Generator(DEVICE).manual_seed(n * k + sum(sizes))
    experts, groups, rows = len(sizes), -(-k // GROUP), max(1, sum(sizes))

    def drawn(limit: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes = torch.randint(-limit, limit, (*shape, k), generator=generator, device=DEVICE)
        scales = (torch.rand(*shape, groups, generator=generator, device=DEVICE) / 64).half()
        wide = scales.double().repeat_interleave(GROUP, dim=-1)[..., :k]
        return codes.to(torch.int8), scales, codes.double() * wide

    codes, scales, x = drawn(128, rows)
    w_codes, w_scales, w = drawn(32, experts, n)
    chunks = pack_experts(w_codes, w_scales, half_scales=True)
    of_device = torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    for config in candidates(FLEXQ, experts, 300):
        results = []
        for _ in range(2):
            y = torch.full((rows, n), torch.nan, device=DEVICE).half()
            grouped_gemm(FLEXQ, config, codes, scales, chunks, None, of_device, y)
            results.append(y)
        assert torch.equal(*(y.view(torch.int16) for y in results)), config
        first = 0
        for expert, size in enumerate(sizes):
            at = slice(first, first + size)
            expected, most = x[at] @ w[expert].T, x[at].abs() @ w[expert].abs().T
            assert (
                (results[0][at].double() - expected).abs()
                <= expected.abs() / 1024 + most * 1e-6 + 2.0**-24  # between subnormal halves
            ).all(), config
            first += size
        assert bool(results[0][first:].isnan().all())


def test_changed_routing_counts_in_a_captured_graph():
    generator = torch.Generator(DEVICE).manual_seed(1)
    chunks, _ = drawn_weights(SIX, 4, 64, 256, generator)
    config = candidates(SIX, 4, 8)[0]
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


_LATE = r"""
extern "C" __global__ void write_late(int* sizes, const int* routing, int experts) {
  asm volatile("griddepcontrol.launch_dependents;");
  const long long begin = clock64();
  while (clock64() - begin < 40000) {
  }
  if (threadIdx.x < experts) sizes[threadIdx.x] = routing[threadIdx.x];
}
"""


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated")
def test_sizes_written_while_weights_are_loaded_early_count():
    """A kernel that lets the next one start before it writes the sizes."""
    import cupy

    write_late = cupy.RawKernel(_LATE, "write_late", options=("-std=c++17",))
    generator = torch.Generator(DEVICE).manual_seed(2)
    n, k, experts = 704, 704, 16
    chunks, weights = drawn_weights(SIX, experts, n, k, generator)
    codes = torch.randint(-128, 128, (64, k), generator=generator, device=DEVICE).to(torch.int8)
    scales = torch.rand(64, generator=generator, device=DEVICE)
    features = torch.rand(experts, n, generator=generator, device=DEVICE).half() / 1024
    sizes = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.Stream()
    for config in candidates(SIX, experts, 64):
        for _ in range(3):
            routing = torch.randint(0, 5, (experts,), generator=generator, device=DEVICE).int()
            y = torch.full((64, n), torch.nan, device=DEVICE).half()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
                write_late((1,), (32,), (sizes.data_ptr(), routing.data_ptr(), experts))
                grouped_gemm(SIX, config, codes, scales, chunks, features, sizes, y)
            torch.cuda.synchronize()
            first = 0
            for expert, size in enumerate(routing.tolist()):
                at = slice(first, first + size)
                sums = (codes[at].double() @ weights[expert].T).float()
                expected = (sums * features[expert].float() * scales[at, None]).half()
                assert torch.equal(y[at], expected), (config, expert)
                first += size
            assert bool(y[first:].isnan().all())


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (70, 60, 4), (9, 512, 16)])
def test_experts_with_the_largest_logits_are_chosen(tokens, experts, top_k, normalizes):
    generator = torch.Generator(DEVICE).manual_seed(experts)
    drawn = [torch.randperm(experts, generator=generator, device=DEVICE) for _ in range(tokens)]
    logits = (torch.stack(drawn) / 16 - 2).half()  # distinct, of both signs
    chosen = torch.full((tokens, top_k), -1, dtype=torch.int32, device=DEVICE)
    shares = torch.full((tokens, top_k), torch.nan, device=DEVICE)

    choose_experts(logits, chosen, shares, normalizes=normalizes)

    values, wanted = torch.topk(torch.softmax(logits.float(), dim=1), top_k, dim=1)
    assert torch.equal(chosen.long(), wanted)
    total = values.sum(dim=1, keepdim=True) if normalizes else 1.0
    torch.testing.assert_close(shares, values / total, rtol=1e-5, atol=1e-7)


def drawn_layer(
    experts: int, k: int, inner: int, generator: torch.Generator
) -> list[tuple[ExpertWeights, torch.Tensor]]:
    """Packed weights of gate_up and of down, and what they stand for."""
    layers = []
    for n, of_k in ((2 * inner, k), (k, inner)):
        chunks, weights = drawn_weights(SIX, experts, n, of_k, generator)
        features = (torch.rand(experts, n, generator=generator, device=DEVICE) * 1e-3).half()
        layers.append((ExpertWeights(SIX, chunks, features, of_k), weights * features[..., None]))
    return layers


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (9, 3), (32, 4), (40, 2)])
def test_norm_adds_the_experts_that_the_router_chose(tokens, top_k, normalizes):
    """A layer in a step: experts are chosen while tokens are sorted, and summed by the norm."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    experts, k = 16, 1032
    (gate_up, _), (down, _) = drawn_layer(experts, k, 192, generator)
    x, residual = torch.randn(2, tokens, k, generator=generator, device=DEVICE).half()
    logits = torch.randn(tokens, experts, generator=generator, device=DEVICE).half()
    chosen = torch.full((tokens, top_k), -1, dtype=torch.int32, device=DEVICE)
    shares = torch.full((tokens, top_k), torch.nan, device=DEVICE)
    out, fused = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    choose_experts(logits, chosen, shares, normalizes=normalizes)
    ExpertLayer(gate_up, down, tokens, top_k)(x, chosen, shares, out)
    layer, operations = ExpertLayer(gate_up, down, tokens, top_k), CudaOperations()
    norm = Norm(torch.rand(k, generator=generator, device=DEVICE).half(), None, 1e-6)
    results = []
    for _ in range(2):
        rows = layer.mix(x, logits, None, normalizes=normalizes)
        layer.mix(x, logits, fused, normalizes=normalizes)
        for delta in (out, rows):
            packed = Fp16Gemm().empty_activation(tokens, k, DEVICE)
            to = Destination(Fp16Gemm(), packed, None)
            total = operations.norm(residual.clone(), delta, norm, to).clone()
            results.append((total, packed.buffers["values"][:tokens, :k]))

    assert torch.equal(fused, out)
    for first, again in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (total, normed), (total_of_rows, normed_of_rows) = results[:2]
    assert torch.equal(total, total_of_rows)
    torch.testing.assert_close(normed, normed_of_rows, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "k"), [(1, 128, 8, 2048), (5, 24, 3, 256), (8, 8, 2, 4096)]
)
def test_norm_and_router_in_one_kernel_choose_alike(tokens, experts, top_k, k, normalizes):
    generator = torch.Generator(DEVICE).manual_seed(k)
    (gate_up, _), (down, _) = drawn_layer(experts, k, 192, generator)
    residual, delta = torch.randn(2, tokens, k, generator=generator, device=DEVICE).half()
    router = (torch.randn(experts, k, generator=generator, device=DEVICE) / 8).half()
    norm = Norm(torch.rand(k, generator=generator, device=DEVICE).half(), None, 1e-6)
    packed = Fp16Gemm().empty_activation(tokens, k, DEVICE)
    total = CudaOperations().norm(residual, delta, norm, Destination(Fp16Gemm(), packed, None))
    x = packed.buffers["values"][:tokens, :k].contiguous()
    logits = (x.float() @ router.float().T).half()
    layer, fused = (ExpertLayer(gate_up, down, tokens, top_k) for _ in range(2))

    expected = layer.mix(x, logits, None, normalizes=normalizes)
    for _ in range(2):
        of_kernel, rows = fused.mix_norm(residual, delta, norm, router, normalizes=normalizes)

        assert torch.equal(of_kernel, total)
        assert torch.equal(fused.sizes, layer.sizes)
        assert torch.equal(rows.numbers, expected.numbers)
        torch.testing.assert_close(rows.shares, expected.shares, rtol=2e-2, atol=1e-3)
        error = (rows.rows.double() - expected.rows.double()).norm() / expected.rows.double().norm()
        assert float(error) < 1e-2


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (5, 3), (40, 2)])
def test_layer_of_experts_is_that_of_separate_linear_layers(tokens, top_k):
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    experts, k, inner = 16, 256, 192
    (gate_up, w1), (down, w2) = drawn_layer(experts, k, inner, generator)
    x = torch.randn(tokens, k, generator=generator, device=DEVICE).half()
    chosen = torch.stack(
        [torch.randperm(experts, generator=generator, device=DEVICE)[:top_k] for _ in range(tokens)]
    ).int()
    shares = torch.rand(tokens, top_k, generator=generator, device=DEVICE)
    out = torch.full_like(x, torch.nan)

    layer = ExpertLayer(gate_up, down, tokens, top_k)
    for _ in range(2):
        layer(x, chosen, shares, out)

    real_x = quantize(x, NumberFormat(8)).dequantize().double()
    for token in range(tokens):
        expected = torch.zeros(k, dtype=torch.float64, device=DEVICE)
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            gate, up = (w1[expert] @ real_x[token]).half().chunk(2)
            hidden = (functional.silu(gate.float()) * up.float()).half()
            real = quantize(hidden[None], NumberFormat(8)).dequantize().double()[0]
            expected += share.double() * (w2[expert] @ real)
        error = (out[token].double() - expected).norm() / expected.norm()
        assert float(error) < 2e-2, (token, float(error))  # other codes at ties
