"""The kernels that people have, in torch on a CPU, each with a variant that is wrong."""

import torch
from torch.nn import functional

from flexq_bench.api import Input, Output, kernel, linear_kernel, operation

CPU = {"backends": ["cpu"]}


def _codes_times_scales(codes, scales, rows=1):
    wide = scales.float().repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.float() * wide.repeat_interleave(rows, 0)[: len(codes)]


@linear_kernel("bf16", weight="bf16", activation="bf16", **CPU)
def bf16_gemm(x, w, out):
    torch.matmul(x, w.T, out=out)


@linear_kernel("fp8-blocks", weight="fp8/128x128", activation="fp8/128", dtype="bf16", **CPU)
def fp8_blocks(x, x_scales, w, w_scales, out):
    y = _codes_times_scales(x, x_scales) @ _codes_times_scales(w, w_scales, 128).T
    out.copy_(y)


def _mx_pairs(numbers, scales):
    codes = torch.bucketize(
        numbers.abs().float(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    )
    codes = (codes | (numbers < 0) << 3).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@linear_kernel("mxfp4", weight="mxfp4", activation="bf16", prepare_weight=_mx_pairs, **CPU)
def mxfp4_weight_only(x, w, scales, magnitudes, out, *, k):
    codes = torch.stack([w & 15, w >> 4], -1).flatten(1).int()
    values = torch.tensor(magnitudes)[codes & 7] * (1 - 2 * (codes >> 3))
    w = values * scales.float().repeat_interleave(32, 1)[:, :k]
    torch.matmul(x, w.bfloat16().T, out=out)


@kernel("grouped_linear", "grouped", dtype="bf16", **CPU)
def grouped(x, w, sizes, y):
    start = 0
    for expert, size in enumerate(sizes.tolist()):
        torch.matmul(x[start : start + size], w[expert].T, out=y[start : start + size])
        start += size


@kernel("attention_decode", "sdpa", returns=True, **CPU)
def sdpa(q, k_cache, v_cache, block_table, *, context):
    k, v = (
        cache[block_table.long()].flatten(1, 2)[:, :context].transpose(1, 2).float()
        for cache in (k_cache, v_cache)
    )
    q = q[:, :, None].float()
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0].half()


@kernel("norm_quantize", "norm-int8", activation="int8/row", dtype="bf16", **CPU)
def norm_int8(x, gamma, codes, scales):
    y = functional.rms_norm(x.float(), x.shape[-1:], gamma.float(), eps=1e-6)
    scales.copy_(y.abs().amax(-1, keepdim=True) / 127)
    codes.copy_((y / scales.float()).round().clamp(-128, 127))


@linear_kernel("returning", weight="int8/row", returns=True, **CPU)
def returning(x, w, scales):
    return ((x.float() @ w.float().T) * scales[:, 0].float()).half()


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


@kernel(top_k_sampling, "sampling", **CPU)
def sampling(logits, uniform, token, *, top_k):
    values, indices = logits.topk(top_k)
    place = torch.searchsorted(values.softmax(-1).cumsum(-1), uniform[:, None])
    token.copy_(indices.gather(1, place.clamp(max=top_k - 1))[:, 0])


@kernel("grouped_linear", "masked", weight="int8/row", dtype="fp32", **CPU)
def masked(x, w, scales, sizes, y, *, tokens):
    for expert, size in enumerate(sizes.tolist()):
        rows = slice(expert * tokens, expert * tokens + size)
        y[rows] = (x[rows] @ w[expert].float().T) * scales[expert, :, 0].float()


@kernel("attention_decode", "int8-cache", cache="int8/row", dtype="bf16", **CPU)
def int8_cache(q, k_cache, k_scales, v_cache, v_scales, block_table, y, *, context):
    k = k_cache.float() * k_scales.float()
    v = v_cache.float() * v_scales.float()
    y.copy_(_attended(q[:, :, None].float(), k, v, block_table, context, None)[:, :, 0])


def _attended(q, k_cache, v_cache, block_table, length, mask):
    k, v = (
        cache[block_table.long()].flatten(1, 2)[:, :length].transpose(1, 2).float()
        for cache in (k_cache, v_cache)
    )
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


@kernel("attention_prefill", "prefill", **CPU)
def prefill(q, k_cache, v_cache, block_table, y, *, past, tokens):
    mask = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    made = _attended(q.transpose(1, 2).float(), k_cache, v_cache, block_table, past + tokens, mask)
    y.copy_(made.transpose(1, 2))


@kernel("norm_quantize", "add-norm-fp8", activation="fp8/row", **CPU)
def add_norm_fp8(x, residual, gamma, codes, scales, total):
    total.copy_(x.float() + residual.float())
    y = x.float() + residual.float()
    y = functional.layer_norm(y, y.shape[-1:], eps=1e-6) * gamma.float()
    scales.copy_(y.abs().amax(-1, keepdim=True) / 448)
    codes.copy_((y / scales.float()).clamp(-448, 448))


@kernel("norm_quantize", "in-place", updates={"total": "residual"}, **CPU)
def in_place(x, residual, gamma, y):
    residual.add_(x)
    y.copy_(functional.rms_norm(residual.float(), gamma.shape, gamma.float(), 1e-6))


@kernel("activation_quantize", "silu", activation="int8/128", **CPU)
def silu(x, codes, scales, *, hidden):
    y = functional.silu(x[:, :hidden].float()) * x[:, hidden:].float()
    grouped = y.view(len(y), -1, 128)
    scales.copy_(grouped.abs().amax(-1) / 127)
    codes.copy_((grouped / scales.float()[..., None]).round().clamp(-128, 127).view_as(y))


@kernel("rope_cache_write", "rope", cache="bf16", dtype="bf16", **CPU)
def rope(q, k, v, rotary, position, slot, q_rotated, k_cache, v_cache):
    cos, sin = rotary[position.long()][:, None].unbind(-1)
    for heads, to in ((q, q_rotated), (k, k_cache)):
        first, second = heads.float().chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        to[slice(None) if to is q_rotated else slot.long()] = turned.to(to.dtype)
    v_cache[slot.long()] = v
