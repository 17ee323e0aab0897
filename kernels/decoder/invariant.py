"""Operators whose result for a token depends on its sequence alone, bit for bit.

Not on the batch, the chunks in which a prompt is read, or the number of multiprocessors: every row
is reduced in an order of its own. Linear layers have the same property if they add integer products
over all of K. Triton kernels on a GPU; on a CPU torch, row by row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexq_bench.kernels.contract import Backend, KernelSpec, PackedOperand
from flexq_bench.kernels.cpu.torch_gemm import TorchGemm, stand_in_spec
from flexq_bench.kernels.decoder.kv import KvLayer
from flexq_bench.kernels.decoder.operations import AttentionShape, Destination, HeadNorms, Norm
from flexq_bench.kernels.decoder.torch_operations import TorchOperations, normalized, split_heads
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import NumberFormat

_KEYS = 32  # cached tokens of a tile of attention
_TILE = (16, 64, 64)  # rows, features and columns of the output head
_WARPS = 4


def is_exact(weight: NumberFormat, activation: NumberFormat | None) -> bool:
    """Return True if kernels of these formats add integers over all of K before they scale."""
    if activation is None or activation.group is not None or not activation.is_integer:
        return False
    whole_rows = weight.group is None or weight.kind == "dual"
    return weight.is_integer and whole_rows


class InvariantOperations(TorchOperations):
    """The operators. The cache must be FP16, norms without a mean."""

    def norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, norm: Norm, to: Destination
    ) -> torch.Tensor:
        total = residual if delta is None else residual + delta
        to.kernel.activate(_normalized(total, norm), to.packed)
        return total

    def norm_heads(self, qkv: torch.Tensor, shape: AttentionShape, norms: HeadNorms) -> None:
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        queries, keys = heads[:, : shape.heads], heads[:, shape.heads : -shape.kv_heads]
        for part, weight in ((queries, norms.queries), (keys, norms.keys)):
            rows = part.reshape(-1, shape.head_dim)
            part.copy_(_normalized(rows, Norm(weight, None, norms.eps)).view_as(part))

    def attend(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        positions: torch.Tensor,
        longest: int,
        to: Destination,
    ) -> None:
        slots = torch.arange(qkv.shape[0], device=qkv.device)
        out = self.attend_prompts(qkv[:, None], shape, cache, slots, positions[:, None], longest)
        to.kernel.activate(out, to.packed)

    def attend_prompts(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        slots: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        if cache.bits != 16:
            raise UnsupportedError("invariant attention reads FP16 caches: leave --kv-bits out")
        queries, keys, values = split_heads(qkv, shape, positions)
        cache.write(keys, values, slots, positions)
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        if queries.is_cuda:
            _attend_on_gpu(queries, shape, cache, slots, positions, out)
        else:
            for row, slot in enumerate(slots.tolist()):
                for token, position in enumerate(positions[row].tolist()):
                    k, v = _cached(cache)[:, slot, :, : position + 1].float()
                    out[row, token] = _attended(queries[row, token].float(), k, v, shape)
        return out.view(len(slots) * qkv.shape[1], -1)


class FixedOrderGemm(TorchGemm):
    """FP16 GEMM that adds the columns of every row in one order."""

    def __init__(self, of: KernelSpec, backend: Backend) -> None:
        summary = "FP16 GEMM whose rows do not depend on each other"
        self.spec = replace(stand_in_spec(of, summary), backend=backend)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.buffers["values"].copy_(x)

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        rows, weights = x.buffers["values"], w.buffers["values"]
        if not rows.is_cuda:
            wide = weights.float()
            return torch.stack([wide @ row for row in rows.float()])
        from flexq_bench.kernels.decoder import invariant_triton

        y = torch.empty(len(rows), len(weights), dtype=torch.float32, device=rows.device)
        grid = (-(-len(weights) // _TILE[1]), -(-len(rows) // _TILE[0]))
        invariant_triton.project[grid](
            rows, weights, y, len(rows), len(weights), x.k, *_TILE, num_warps=_WARPS
        )
        return y


def _cached(cache: KvLayer) -> torch.Tensor:
    return cache.codes.view(torch.float16)


def _normalized(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.bias is not None:
        raise UnsupportedError("invariant norms have no mean and bias: pick a model like LLaMA")
    if not x.is_cuda:
        return torch.cat([normalized(row[None], norm) for row in x])
    from flexq_bench.kernels.decoder import invariant_triton

    x = x.contiguous()
    out, block = torch.empty_like(x), 1 << (x.shape[1] - 1).bit_length()
    invariant_triton.rms_norm[(len(x),)](
        x, norm.weight, out, x.shape[1], norm.eps, block, num_warps=_WARPS
    )
    return out


def _attended(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """Attention FP16 [heads, head_dim] of a query [heads, head_dim] to keys [KV heads, T, …]."""
    grouped = query.view(shape.kv_heads, -1, shape.head_dim)
    scores = grouped @ k.transpose(1, 2) * shape.head_dim**-0.5
    return (torch.softmax(scores, dim=-1) @ v).view(shape.heads, shape.head_dim).half()


def _attend_on_gpu(
    queries: torch.Tensor,
    shape: AttentionShape,
    cache: KvLayer,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    from flexq_bench.kernels.decoder import invariant_triton

    cached = _cached(cache)
    batch, tokens = queries.shape[:2]
    invariant_triton.attention[(batch * tokens, shape.heads)](
        queries,
        cached,
        slots,
        positions.contiguous(),
        out,
        shape.head_dim**-0.5,
        shape.heads,
        shape.kv_heads,
        cache.capacity,
        cached[0].numel(),
        tokens,
        shape.head_dim,
        _KEYS,
        num_warps=_WARPS,
    )
