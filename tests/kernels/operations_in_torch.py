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
