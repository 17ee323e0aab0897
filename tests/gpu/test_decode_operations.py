"""Every fused operation of a decode step against its composition in torch."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import LinearKernel, PackedOperand, Packing
from flexq_bench.kernels.decoder import (
    AttentionShape,
    Destination,
    HeadNorms,
    Norm,
    cuda_operations,
)
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.invariant import FixedOrderCudaGemm, InvariantCudaOperations
from flexq_bench.kernels.decoder.kv import KvLayer, decode, empty_layer
from flexq_bench.kernels.decoder.torch_operations import TorchOperations

DEVICE = torch.device("cuda")
# What packs in each way, and one whose activations only its own kernel packs.
KERNELS = (
    "fp16",
    "w8a16",
    "flexq",
    "flexq[w6a8]",
    "flexq-imma-w6a6",
    "cublaslt-w8a8",
    "abq-w6a6",
)
SIZES = (
    (1, 128),
    (5, 5120),
    (3, 64),
    (8, 172),
    (2, 4096),
    (17, 576),
    (40, 1536),
    (1, 13824),
    (33, 8192),
)
OPERATIONS = ("rms", "layer", "silu", "relu")


def kernel_of(label: str) -> LinearKernel:
    kernel = registry.resolve(label, "cuda")
    assert isinstance(kernel, LinearKernel)
    return kernel


def poisoned(kernel: LinearKernel, m: int, k: int) -> PackedOperand:
    """Activations whose old contents would be seen. Padding is the kernel's own: zeros."""
    packed = kernel.empty_activation(m, k, DEVICE)
    kernel.activate(torch.randn(m, k, device=DEVICE).half() * 100, packed)
    return packed


def same(kernel: LinearKernel, got: PackedOperand, wanted: PackedOperand) -> bool:
    """Whether what the kernel's default configuration reads is the same.

    FP16 results to a unit in the last place; codes to one, in a few places in a thousand.

    A norm sums in another order than torch does, which moves a rare value across a tie.
    """
    packing = kernel.packing(wanted, None)
    read = None if packing is None else {packing.values.data_ptr()}
    if read is not None and packing is not None and packing.scales is not None:
        read.add(packing.scales.data_ptr())
    for name, expected in wanted.buffers.items():
        found = got.buffers[name]
        if read is not None and expected.data_ptr() not in read:
            continue
        if found.dtype == torch.int32:  # bit planes: a code that is one off changes few words
            if (found != expected).float().mean() > 0.02:
                return False
        elif found.dtype == torch.int8:
            far = (found.int() - expected.int()).abs()
            if int(far.max()) > 1 or float((far > 0).float().mean()) > 0.01:
                return False
        elif not torch.allclose(found.float(), expected.float(), rtol=2e-3, atol=1e-4):
            return False
    return True


@pytest.mark.parametrize(("m", "k"), SIZES)
@pytest.mark.parametrize("label", KERNELS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_fused_operation_packs_the_same_values_as_the_composition(
    operation: str, label: str, m: int, k: int
) -> None:
    torch.manual_seed(m * k)
    kernel = kernel_of(label)
    got, wanted = poisoned(kernel, m, k), kernel.empty_activation(m, k, DEVICE)
    weight, bias = torch.rand(k, device=DEVICE).half(), torch.randn(k, device=DEVICE).half()
    x, delta = torch.randn(m, k, device=DEVICE).half(), torch.randn(m, k, device=DEVICE).half()
    wide = torch.randn(m, 2 * k, device=DEVICE).half()
    residuals = []
    for operations, packed in ((CudaOperations(), got), (TorchOperations(), wanted)):
        to = Destination(kernel, packed, None)
        residual = x.clone()
        if operation == "silu":
            operations.silu_mul(wide, to)
        elif operation == "relu":
            operations.relu(x, to)
        else:
            norm = Norm(weight, bias if operation == "layer" else None, 1e-5)
            residual = operations.norm(residual, delta, norm, to)
        residuals.append(residual)
    torch.cuda.synchronize()

    assert same(kernel, got, wanted)
    assert torch.equal(*residuals)


HEADS = ((4, 4, 128), (8, 1, 128), (6, 2, 64), (9, 3, 64), (2, 2, 80), (8, 4, 8), (4, 1, 256))


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_norms_of_heads_leave_values_alone(
    heads: int, kv_heads: int, head_dim: int, rows: int
) -> None:
    torch.manual_seed(rows)
    shape = AttentionShape(heads, kv_heads, head_dim, None)
    weights = (torch.rand(head_dim, device=DEVICE).half() + 0.5 for _ in range(2))
    norms = HeadNorms(*weights, 1e-6)
    qkv = (torch.randn(rows, shape.width, device=DEVICE) * 3).half()
    got, wanted = qkv.clone(), qkv.clone()
    CudaOperations().norm_heads(got, shape, norms)
    TorchOperations().norm_heads(wanted, shape, norms)

    assert torch.allclose(got, wanted, rtol=2e-3, atol=1e-6)
    values = (heads + kv_heads) * head_dim
    assert torch.equal(got[:, values:], qkv[:, values:])


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_attention_of_sequences_at_different_positions(
    heads: int, kv_heads: int, head_dim: int, rotary: bool, bits: int
) -> None:
    torch.manual_seed(heads * head_dim + bits)
    capacity, positions = 700, torch.tensor([0, 1, 63, 64, 650], dtype=torch.int32, device=DEVICE)
    angles = torch.rand(capacity, head_dim // 2, device=DEVICE) * 6
    table = torch.stack([angles.cos(), angles.sin()], dim=-1).contiguous()
    shape = AttentionShape(heads, kv_heads, head_dim, table if rotary else None)
    qkv = torch.randn(5, shape.width, device=DEVICE).half()
    caches = [empty_layer(5, kv_heads, capacity, head_dim, bits, DEVICE) for _ in range(2)]
    _fill_alike(caches)
    kernel = kernel_of("w8a16")
    outputs = []
    for operations, cache in zip((CudaOperations(), TorchOperations()), caches, strict=True):
        packed = kernel.empty_activation(5, heads * head_dim, DEVICE)
        to = Destination(kernel, packed, None)
        operations.attend(qkv, shape, cache, positions, 651, to)
        outputs.append(packed.buffers["values"].float())
    torch.cuda.synchronize()

    assert torch.allclose(*outputs, atol=4e-3, rtol=4e-3)
    for b, position in enumerate(positions.tolist()):
        for of in ("keys", "values"):
            got, wanted = (_token(cache, of, b, position) for cache in caches)
            step = 0.0 if bits == 16 else float(wanted.max() - wanted.min()) / (2**bits - 1)
            assert torch.allclose(got, wanted, atol=1.1 * step + 4e-3, rtol=2e-3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (16, 2), (40, 8)])
@pytest.mark.parametrize("label", ["flexq", "flexq[w6a8]", "cublaslt-w8a8", "abq-w6a6", "fp16"])
def test_attention_packs_the_same_values_as_a_kernel(label: str, heads: int, kv_heads: int) -> None:
    torch.manual_seed(heads)
    positions = torch.tensor([0, 63, 64, 127, 128, 899], dtype=torch.int32, device=DEVICE)
    batch, capacity, k = len(positions), 900, heads * 128
    shape = AttentionShape(heads, kv_heads, 128, None)
    qkv = torch.randn(batch, shape.width, device=DEVICE).half()
    cache = empty_layer(batch, kv_heads, capacity, 128, 16, DEVICE)
    _fill_alike([cache, cache])
    plain, kernel, operations = kernel_of("w8a16"), kernel_of(label), CudaOperations()
    halves = plain.empty_activation(batch, k, DEVICE)
    operations.attend(qkv, shape, cache, positions, capacity, Destination(plain, halves, None))
    wanted = kernel.empty_activation(batch, k, DEVICE)
    kernel.activate(halves.buffers["values"][:batch, :k], wanted)
    for _ in range(3):  # blocks that read others' sums leave everything as they found it
        got = poisoned(kernel, batch, k)
        operations.attend(qkv, shape, cache, positions, capacity, Destination(kernel, got, None))
        torch.cuda.synchronize()

        assert same(kernel, got, wanted)


@pytest.mark.parametrize("label", ["flexq", "dual-w6a8", "w8a16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (16, 2)])
def test_invariant_attention_does_not_depend_on_the_longest_sequence(
    label: str, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(heads)
    operations, kernel, capacity = InvariantCudaOperations(), kernel_of(label), 2100
    positions = torch.tensor([0, 63, 511, 512, 1100, 2080], dtype=torch.int32, device=DEVICE)
    shape = AttentionShape(heads, kv_heads, 128, None)
    qkv = torch.randn(len(positions), shape.width, device=DEVICE).half()
    cache = empty_layer(len(positions), kv_heads, capacity, 128, 16, DEVICE)
    _fill_alike([cache, cache])

    def attended(count: int, longest: int) -> torch.Tensor:
        packed = kernel.empty_activation(count, heads * 128, DEVICE)
        to = Destination(kernel, packed, None)
        operations.attend(qkv[:count], shape, cache, positions[:count], longest, to)
        packing = kernel.packing(packed, None)
        assert packing is not None
        return packing.values[:count].clone()

    together = attended(6, capacity)
    for count, longest in ((1, 1), (2, 64), (3, 512), (4, 513), (5, 1101)):
        assert torch.equal(attended(count, longest), together[:count])


@pytest.mark.parametrize(
    ("label", "shape"),
    [
        ("dual-w6a8", AttentionShape(9, 3, 64, None)),  # sums are reduced by another kernel
        ("w8a16", AttentionShape(12, 3, 64, None)),  # by a cluster
        ("flexq", AttentionShape(8, 4, 128, None)),
    ],
)
def test_splits_are_the_same_by_one_block_or_by_several(label, shape, monkeypatch) -> None:
    torch.manual_seed(9)
    operations, kernel, batch, capacity = InvariantCudaOperations(), kernel_of(label), 99, 600
    values = shape.heads * shape.head_dim
    positions = torch.randint(0, capacity, (batch,), dtype=torch.int32, device=DEVICE)
    positions[:6] = torch.tensor([0, 1, 127, 128, 512, 599])
    qkv = torch.randn(batch, shape.width, device=DEVICE).half()
    cache = empty_layer(batch, shape.kv_heads, capacity, shape.head_dim, 16, DEVICE)
    _fill_alike([cache, cache])

    def attended() -> Packing:
        packed = kernel.empty_activation(batch, values, DEVICE)
        operations.attend(qkv, shape, cache, positions, capacity, Destination(kernel, packed, None))
        packing = kernel.packing(packed, None)
        assert packing is not None
        return packing

    by_one = attended()
    monkeypatch.setattr(cuda_operations, "is_serial", lambda *_: False)
    by_several = attended()

    assert by_one.values.any()
    assert torch.equal(by_one.values, by_several.values)
    if by_one.scales is not None and by_several.scales is not None:
        assert torch.equal(by_one.scales, by_several.scales)


@pytest.mark.parametrize(("n", "k"), [(49152, 576), (1000, 4096)])
def test_rows_of_fp16_gemm_of_fixed_order_are_independent(n: int, k: int) -> None:
    torch.manual_seed(n)
    kernel = FixedOrderCudaGemm()
    weights = PackedOperand({"values": torch.randn(n, k, device=DEVICE).half()}, n, k)
    x, bias = torch.randn(300, k, device=DEVICE).half(), torch.randn(n, device=DEVICE).half()

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), n, dtype=torch.float16, device=DEVICE)
        packed = kernel.empty_activation(len(rows), k, DEVICE)
        made = kernel.linear(rows, packed, weights, out, bias=bias)
        return out if made is None else made

    together = product(x)
    wanted = (x.float() @ weights.buffers["values"].float().T + bias.float()).half()
    assert torch.allclose(together, wanted, atol=0.3, rtol=4e-3)
    for first, rows in ((0, 1), (7, 8), (100, 128), (299, 1), (40, 256)):
        assert torch.equal(product(x[first : first + rows]), together[first : first + rows])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_attention_normalizes_heads_as_the_separate_norm(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(heads)
    positions = torch.tensor([0, 5, 299], dtype=torch.int32, device=DEVICE)
    angles = torch.rand(300, head_dim // 2, device=DEVICE) * 6
    table = torch.stack([angles.cos(), angles.sin()], dim=-1).contiguous()
    shape = AttentionShape(heads, kv_heads, head_dim, table)
    qkv = torch.randn(3, shape.width, device=DEVICE).half() * 3
    norms = HeadNorms(*torch.rand(2, head_dim, device=DEVICE).half(), 1e-6)
    cache = empty_layer(3, kv_heads, 300, head_dim, 16, DEVICE)
    _fill_alike([cache, cache])
    kernel, operations = kernel_of("w8a16"), CudaOperations()
    outputs = []
    for is_fused in (True, False):
        given = qkv.clone()
        if not is_fused:
            operations.norm_heads(given, shape, norms)
        packed = kernel.empty_activation(3, heads * head_dim, DEVICE)
        to = Destination(kernel, packed, None)
        operations.attend(given, shape, cache, positions, 300, to, norms if is_fused else None)
        outputs.append((packed.buffers["values"].float(), _token(cache, "keys", 2, 299).clone()))

    for fused, separate in zip(*outputs, strict=True):
        assert torch.allclose(fused, separate, atol=2e-3, rtol=4e-3)


@pytest.mark.parametrize("vocabulary", [1, 50, 1024, 32000, 50257])
def test_the_token_picked_is_the_first_of_the_largest(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    coarse = torch.randint(-40, 40, (5, vocabulary), device=DEVICE).half() / 8
    fine = torch.randn(3, vocabulary, device=DEVICE).half()
    low = torch.full((1, vocabulary), -torch.inf, device=DEVICE).half()
    zeros = torch.zeros(1, vocabulary, device=DEVICE).half()
    zeros[0, : vocabulary // 2] *= -1
    unknown = torch.randn(1, vocabulary, device=DEVICE).half()
    unknown[0, vocabulary // 2 :] = torch.nan
    logits = torch.cat([coarse, fine, low, zeros, unknown])
    states = []
    for operations in (CudaOperations(), TorchOperations()):
        tokens = torch.full((11,), -1, dtype=torch.int32, device=DEVICE)
        positions = torch.arange(11, dtype=torch.int32, device=DEVICE) * 2
        history = torch.full((12, 20), -1, dtype=torch.int64, device=DEVICE)
        operations.pick(logits, tokens, positions, history)
        states.append((tokens, positions, history))
    torch.cuda.synchronize()

    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


def _fill_alike(caches: list[KvLayer]) -> None:
    first, second = caches
    if first.bits == 16:
        halves = torch.randn(*first.codes.shape[:4], first.codes.shape[4] // 2).half()
        first.codes.copy_(halves.view(torch.uint8))
    else:
        first.codes.copy_(torch.randint(0, 256, first.codes.shape, dtype=torch.uint8))
    second.codes.copy_(first.codes)
    if first.scales is not None and second.scales is not None:
        first.scales.copy_(torch.rand(first.scales.shape) * (2.0 / (2**first.bits - 1)))
        second.scales.copy_(first.scales)


def _token(cache: KvLayer, of: str, slot: int, position: int) -> torch.Tensor:
    codes = getattr(cache, of)[slot, :, position]
    scales = cache.key_scales if of == "keys" else cache.value_scales
    return decode(codes, None if scales is None else scales[slot, :, position], cache.bits)
