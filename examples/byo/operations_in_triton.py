"""Kernels that people have, on a GPU in Triton and torch, each declared in a few lines.

flexq-bench sweep --kernels-from examples/byo/operations_in_triton.py --n 4096 --k 4096
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

from flexq_bench.api import Input, Output, kernel, linear_kernel, operation

CUDA = {"backends": ["cuda"]}
TILES = [{"tile": (16, 64, 128)}, {"tile": (64, 128, 64)}, {"tile": (128, 128, 64)}]


@triton.jit
def _tile(pointer, rows, columns, row_count, column_count):
    """A tile of a matrix [row_count, column_count], zeros beyond its ends."""
    inside = (rows[:, None] < row_count) & (columns[None, :] < column_count)
    return tl.load(pointer + rows[:, None] * column_count + columns[None, :], inside, 0.0)


@triton.jit
def _store(pointer, rows, columns, row_count, column_count, values):
    inside = (rows[:, None] < row_count) & (columns[None, :] < column_count)
    at = pointer + rows[:, None] * column_count + columns[None, :]
    tl.store(at, values.to(pointer.dtype.element_ty), inside)


@triton.jit
def _dense(
    x, w, out, m, n, k, rows_each: tl.constexpr, columns_each: tl.constexpr, k_each: tl.constexpr
):
    rows = tl.program_id(0) * rows_each + tl.arange(0, rows_each)
    columns = tl.program_id(1) * columns_each + tl.arange(0, columns_each)
    sums = tl.zeros((rows_each, columns_each), tl.float32)
    for start in range(0, k, k_each):
        ks = start + tl.arange(0, k_each)
        sums += tl.dot(_tile(x, rows, ks, m, k), tl.trans(_tile(w, columns, ks, n, k)))
    _store(out, rows, columns, m, n, sums)


@linear_kernel("bf16", weight="bf16", activation="bf16", configurations=TILES, **CUDA)
def bf16(x, w, out, *, m, n, k, tile):
    grid = triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1])
    _dense[grid](x, w, out, m, n, k, *tile)


@triton.jit
def _scaled(x, xs, w, ws, out, m, n, k, rows_each: tl.constexpr, columns_each: tl.constexpr):
    rows = tl.program_id(0) * rows_each + tl.arange(0, rows_each)
    columns = tl.program_id(1) * columns_each + tl.arange(0, columns_each)
    blocks = tl.cdiv(k, 128)
    sums = tl.zeros((rows_each, columns_each), tl.float32)
    for block in range(blocks):
        ks = block * 128 + tl.arange(0, 128)
        products = tl.dot(_tile(x, rows, ks, m, k), tl.trans(_tile(w, columns, ks, n, k)))
        of_x = tl.load(xs + rows * blocks + block, rows < m, 0).to(tl.float32)
        of_w = tl.load(ws + columns // 128 * blocks + block, columns < n, 0)
        sums += products * of_x[:, None] * of_w[None, :]
    _store(out, rows, columns, m, n, sums)


@linear_kernel("fp8-blocks", weight="fp8/128x128", activation="fp8/128", dtype="bf16", **CUDA)
def fp8_blocks(x, x_scales, w, w_scales, out, *, m, n, k):
    grid = triton.cdiv(m, 64), triton.cdiv(n, 128)
    _scaled[grid](x, x_scales, w, w_scales, out, m, n, k, 64, 128)


def _mx_pairs(numbers, scales):
    """Two codes in a byte, and the exponents of the scales."""
    limits = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=numbers.device)
    codes = torch.bucketize(numbers.abs().float(), limits) | (numbers < 0).long() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales.view(torch.uint8)


@triton.jit
def _e2m1(codes):
    """The numbers of 4-bit codes: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = ((codes >> 1) & 3).to(tl.float32), (codes & 1).to(tl.float32)
    number = tl.where(exponent > 0, (1 + mantissa / 2) * tl.exp2(exponent - 1), mantissa / 2)
    return tl.where((codes & 8) > 0, -number, number)


@triton.jit
def _mx(
    x,
    w,
    ws,
    out,
    m,
    n,
    k,
    rows_each: tl.constexpr,
    columns_each: tl.constexpr,
    k_each: tl.constexpr,
):
    rows = tl.program_id(0) * rows_each + tl.arange(0, rows_each)
    columns = tl.program_id(1) * columns_each + tl.arange(0, columns_each)
    sums = tl.zeros((rows_each, columns_each), tl.float32)
    for start in range(0, k, k_each):
        pairs = start // 2 + tl.arange(0, k_each // 2)
        codes = _tile(w, columns, pairs, n, k // 2)
        scales = tl.exp2(_tile(ws, columns, pairs // 16, n, k // 32).to(tl.float32) - 127)
        low, high = _e2m1(codes & 15) * scales, _e2m1(codes >> 4) * scales
        sums += tl.dot(_tile(x, rows, 2 * pairs, m, k), tl.trans(low.to(x.dtype.element_ty)))
        sums += tl.dot(_tile(x, rows, 2 * pairs + 1, m, k), tl.trans(high.to(x.dtype.element_ty)))
    _store(out, rows, columns, m, n, sums)


@linear_kernel("mxfp4", weight="mxfp4", activation="bf16", prepare_weight=_mx_pairs, **CUDA)
def mxfp4(x, w, w_scales, out, *, m, n, k):
    _mx[triton.cdiv(m, 16), triton.cdiv(n, 64)](x, w, w_scales, out, m, n, k, 16, 64, 128)


@triton.jit
def _grouped(
    x, w, sizes, y, n, k, count: tl.constexpr, rows_each: tl.constexpr, columns_each: tl.constexpr
):
    expert, all_experts = tl.program_id(0), tl.arange(0, count)
    of_experts = tl.load(sizes + all_experts)
    first = tl.sum(tl.where(all_experts < expert, of_experts, 0))
    end = first + tl.sum(tl.where(all_experts == expert, of_experts, 0))
    columns = tl.program_id(1) * columns_each + tl.arange(0, columns_each)
    for start in range(first, end, rows_each):
        rows = start + tl.arange(0, rows_each)
        sums = tl.zeros((rows_each, columns_each), tl.float32)
        for k_start in range(0, k, 64):
            ks = k_start + tl.arange(0, 64)
            of_w = _tile(w + expert.to(tl.int64) * n * k, columns, ks, n, k)
            sums += tl.dot(_tile(x, rows, ks, end, k), tl.trans(of_w))
        _store(y, rows, columns, end, n, sums)


@kernel("grouped_linear", "grouped", dtype="bf16", **CUDA)
def grouped(x, w, sizes, y, *, experts, n, k):
    """Experts must be a power of two."""
    _grouped[experts, triton.cdiv(n, 64)](x, w, sizes, y, n, k, experts, 16, 64)


@kernel("attention_decode", "sdpa", dtype="bf16", returns=True, **CUDA)
def sdpa(q, k_cache, v_cache, block_table):
    """Of a contiguous cache."""
    k, v = (cache.transpose(1, 2) for cache in (k_cache, v_cache))
    return functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


@triton.jit
def _norm(x, gamma, codes, scales, hidden, block: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, block)
    at, inside = row * hidden + columns, columns < hidden
    values = tl.load(x + at, inside, 0).to(tl.float32)
    root = tl.sqrt(tl.sum(values * values) / hidden + 1e-6)
    y = values / root * tl.load(gamma + columns, inside, 0).to(tl.float32)
    scale = (tl.max(tl.abs(y)) / 127).to(tl.float16).to(tl.float32)
    tl.store(scales + row, scale.to(tl.float16))
    quotient = y / scale
    nearest = tl.where(quotient >= 0, quotient + 0.5, quotient - 0.5)
    tl.store(codes + at, tl.clamp(nearest, -128.0, 127.0).to(tl.int8), inside)


@kernel("norm_quantize", "norm-int8", activation="int8/row", dtype="bf16", **CUDA)
def norm_int8(x, gamma, codes, scales, *, tokens, hidden):
    _norm[(tokens,)](x, gamma, codes, scales, hidden, triton.next_power_of_2(hidden))


def _tinygemm(codes, scales):
    codes = codes.int() + 8
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
    zeros_too = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8), zeros_too


@linear_kernel(
    "tinygemm",
    weight="int4/128@bf16",
    activation="bf16",
    prepare_weight=_tinygemm,
    returns=True,
    rounds_to=8,
    **CUDA,
)
def tinygemm(x, tiles, scales):
    """The kernel of torchao's int4 weights, which allocates its result."""
    return torch.ops.aten._weight_int4pack_mm(x, tiles, 128, scales)


@operation(
    "top_k_sampling",
    parameters=["tokens", "vocabulary", "top_k=50"],
    inputs=[
        Input("logits", ("tokens", "vocabulary"), "fp32", "activation"),
        Input("uniform", ("tokens",), "fp32", "activation", "uniform"),
    ],
    outputs=[Output("token", ("tokens",), "int64")],
    bytes="4 * tokens * vocabulary",
)
def top_k_sampling(logits, uniform, top_k):
    """Draw a token among the most likely ones."""
    values, indices = logits.topk(top_k)
    shares = values.softmax(-1).cumsum(-1)
    place = (shares < uniform[:, None]).sum(-1, keepdim=True).clamp(max=top_k - 1)
    return indices.gather(1, place)[:, 0]


@kernel(top_k_sampling, "sampling", **CUDA)
def sampling(logits, uniform, token, *, top_k):
    values, indices = logits.topk(top_k)
    place = torch.searchsorted(values.softmax(-1).cumsum(-1), uniform[:, None])
    token.copy_(indices.gather(1, place.clamp(max=top_k - 1))[:, 0])
