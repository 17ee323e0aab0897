"""Operators whose result for a token depends on its sequence alone, bit for bit.

Not on the batch, the chunks in which a prompt is read, or the number of multiprocessors: every row
is reduced in an order of its own. Linear layers have the same property if they add integer products
over all of K. On a GPU the usual kernels, with shapes that no batch decides; on a CPU torch, row by
row. Prompts and steps have attention of their own. FP16 sums are those of other GPUs for which
cuBLASLt's first algorithm is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import (
    Backend,
    Config,
    GemmCall,
    KernelSpec,
    LinearKernel,
    PackedOperand,
)
from flexq_bench.kernels.cpu.torch_gemm import TorchGemm, stand_in_spec
from flexq_bench.kernels.cuda.cublas.cublaslt import LtConfig
from flexq_bench.kernels.cuda.cublas.dense import Fp16Gemm
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.kv import KvLayer
from flexq_bench.kernels.decoder.operations import (
    AttentionShape,
    DecoderOperations,
    Destination,
    HeadNorms,
    Norm,
    WeightedRows,
)
from flexq_bench.kernels.decoder.torch_operations import TorchOperations, normalized, split_heads
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.workloads.gemm import GemmWorkload

_SPLIT_TOKENS = 128  # of a sequence for each split in a step's attention
_TILE = 64  # tokens of a prompt, and cached ones, that its attention multiplies at once
_TILE_WARPS = 4
_FP16_ROWS = 128  # tokens of each call of cuBLASLt


def is_exact(weight: NumberFormat, activation: NumberFormat | None) -> bool:
    """Return True if kernels of these formats add integers over all of K before they scale."""
    if activation is None or activation.group is not None or not activation.is_integer:
        return False
    whole_rows = weight.group is None or weight.kind == "dual"
    return weight.is_integer and whole_rows


def invariant_operations(device: torch.device) -> DecoderOperations:
    """Return the operators of a device. Their cache must be FP16."""
    return InvariantCudaOperations() if device.type == "cuda" else InvariantOperations()


def fixed_order_gemm(spec: KernelSpec, backend: Backend) -> LinearKernel:
    """Return the FP16 GEMM of a backend that adds the columns of every row in one order."""
    return FixedOrderCudaGemm() if backend == "cuda" else FixedOrderGemm(spec)


class InvariantCudaOperations(CudaOperations):
    """Those of a GPU."""

    def __init__(self) -> None:
        super().__init__(_SPLIT_TOKENS)

    def attend_prompts(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        slots: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        from flexq_bench.kernels.decoder import invariant_triton

        queries = _written(qkv, shape, cache, slots, positions).contiguous()
        cached, out = _cached(cache), torch.empty_like(queries)
        batch, tokens = queries.shape[:2]
        invariant_triton.attention[(-(-tokens // _TILE), shape.heads, batch)](
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
            max(16, 1 << (shape.head_dim - 1).bit_length()),
            _TILE,
            num_warps=_TILE_WARPS,
        )
        return out.view(batch * tokens, -1)


class InvariantOperations(TorchOperations):
    """Those of a CPU, row by row."""

    def norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | WeightedRows | None,
        norm: Norm,
        to: Destination,
    ) -> torch.Tensor:
        assert not isinstance(delta, WeightedRows)
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
        norms: HeadNorms | None = None,
    ) -> None:
        if norms is not None:
            self.norm_heads(qkv, shape, norms)
        slots = torch.arange(qkv.shape[0])
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
        queries = _written(qkv, shape, cache, slots, positions)
        out = torch.empty_like(queries)
        for row, slot in enumerate(slots.tolist()):
            for token, position in enumerate(positions[row].tolist()):
                k, v = _cached(cache)[:, slot, :, : position + 1].float()
                out[row, token] = _attended(queries[row, token].float(), k, v, shape)
        return out.view(len(slots) * qkv.shape[1], -1)


class FixedOrderCudaGemm(Fp16Gemm):
    """cuBLASLt's first algorithm for 128 tokens, for any number: rows do not depend on others."""

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        packed = super().empty_activation(_rounded_up(m), k, device)
        return PackedOperand(packed.buffers, m, k)

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return [self.default_config(gemm)]

    def default_config(self, gemm: GemmWorkload) -> LtConfig:
        return LtConfig(algorithm=0, m_padded=_FP16_ROWS)

    def compute(self, call: GemmCall, config: Config | None) -> torch.Tensor | None:
        x, w, out, bias, shape = call
        weights, values = w.buffers["values"], x.buffers["values"]
        rows = _rounded_up(shape.m)
        y = out if rows == shape.m else out.new_empty(rows, shape.n)
        for first in range(0, rows, _FP16_ROWS):
            part = slice(first, first + _FP16_ROWS)
            self._multiply(shape, weights, values[part], y[part], self.default_config(shape))
        if bias is not None:
            y += bias
        return None if y is out else y[: shape.m]


class FixedOrderGemm(TorchGemm):
    """FP16 GEMM of a CPU, row by row."""

    def __init__(self, of: KernelSpec) -> None:
        self.spec = stand_in_spec(of, "FP16 GEMM whose rows do not depend on each other")

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.buffers["values"].copy_(x)

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        wide = w.buffers["values"].float()
        return torch.stack([wide @ row for row in x.buffers["values"].float()])


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _FP16_ROWS) * _FP16_ROWS


def _written(
    qkv: torch.Tensor,
    shape: AttentionShape,
    cache: KvLayer,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Write keys and values to the cache; return the queries [B, T, heads, head_dim], rotated."""
    if cache.bits != 16:
        raise UnsupportedError("invariant attention reads FP16 caches: leave --kv-bits out")
    queries, keys, values = split_heads(qkv, shape, positions)
    cache.write(keys, values, slots, positions)
    return queries


def _cached(cache: KvLayer) -> torch.Tensor:
    return cache.codes.view(torch.float16)


def _normalized(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return torch.cat([normalized(row[None], norm) for row in x])


def _attended(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """Attention FP16 [heads, head_dim] of a query [heads, head_dim] to keys [KV heads, T, …]."""
    grouped = query.view(shape.kv_heads, -1, shape.head_dim)
    scores = grouped @ k.transpose(1, 2) * shape.head_dim**-0.5
    return (torch.softmax(scores, dim=-1) @ v).view(shape.heads, shape.head_dim).half()
