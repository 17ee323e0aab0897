"""The decoder's operators as kernels of operations, declared through the public interface.

They write FP16, or codes of 8 bits with an FP32 scale per row, as the kernels that read them want.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from flexq_bench.kernels.contract import LinearKernel, PackedOperand
from flexq_bench.kernels.cpu import dense as cpu_dense
from flexq_bench.kernels.cuda.cublas import dense as cuda_dense
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.kv import KvLayer
from flexq_bench.kernels.decoder.operations import (
    AttentionShape,
    DecoderOperations,
    Destination,
    Norm,
)
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.external.declare import kernel
from flexq_bench.kernels.external.function_kernel import FunctionDefinition
from flexq_bench.kernels.operations.norm_quantize import EPS

Tensors = tuple[torch.Tensor, ...]


@cache
def _operations(device: str) -> DecoderOperations:
    return CudaOperations() if device == "cuda" else TorchOperations()


@cache
def _reader(device: str, *, has_codes: bool) -> LinearKernel:
    """A kernel whose activations the operators write."""
    of_cuda = cuda_dense.Int8Gemm() if has_codes else cuda_dense.Fp16Gemm()
    if device == "cuda":
        return of_cuda
    return (cpu_dense.Int8Gemm if has_codes else cpu_dense.Fp16Gemm)(of_cuda.spec)


def _destination(x: torch.Tensor, columns: int, *, has_codes: bool) -> tuple[Destination, Tensors]:
    """Activations [rows of x, columns] of a kernel, and their tensors."""
    rows, device = len(x), x.device
    buffers = {"values": torch.empty(rows, columns, dtype=torch.float16, device=device)}
    if has_codes:
        codes = torch.empty(rows, columns, dtype=torch.int8, device=device)
        scales = torch.empty(rows, dtype=torch.float32, device=device)
        of_cpu = scales[:, None]
        buffers = {"codes": codes, "scales": scales if device.type == "cuda" else of_cpu}
    tensors = tuple(b.view(rows, -1) for b in buffers.values())
    reader = _reader(device.type, has_codes=has_codes)
    return Destination(reader, PackedOperand(buffers, rows, columns), None), tensors


def _norm(given: Tensors, norm: str, *, has_codes: bool) -> Tensors:
    x, *residual, gamma = given
    if norm != "rms":
        raise UnsupportedError("the decoder's layer norm has a bias: measure norm=rms")
    to, made = _destination(x, x.shape[1], has_codes=has_codes)
    first, delta = (residual[0], x) if residual else (x, None)
    total = _operations(x.device.type).norm(first, delta, Norm(gamma, None, EPS), to)
    return (*made, total) if residual else made


@kernel("norm_quantize", "decoder-norm", returns=True)
def norm_halves(*given: torch.Tensor, norm: str) -> Tensors:
    """Norm of a decoder, after the residual addition."""
    return _norm(given, norm, has_codes=False)


@kernel("norm_quantize", "decoder-norm", variant="int8", activation="int8/row@fp32", returns=True)
def norm_codes(*given: torch.Tensor, norm: str) -> Tensors:
    """Norm of a decoder, with int8 codes of each row."""
    return _norm(given, norm, has_codes=True)


def _activation(x: torch.Tensor, hidden: int, function: str, *, has_codes: bool) -> Tensors:
    if function != "silu_mul":
        raise UnsupportedError("the decoder has no GELU: measure function=silu_mul")
    to, made = _destination(x, hidden, has_codes=has_codes)
    _operations(x.device.type).silu_mul(x, to)
    return made


@kernel("activation_quantize", "decoder-silu-mul", returns=True)
def silu_mul_halves(x: torch.Tensor, *, hidden: int, function: str) -> Tensors:
    """Gated activation of a decoder."""
    return _activation(x, hidden, function, has_codes=False)


@kernel(
    "activation_quantize",
    "decoder-silu-mul",
    variant="int8",
    activation="int8/row@fp32",
    returns=True,
)
def silu_mul_codes(x: torch.Tensor, *, hidden: int, function: str) -> Tensors:
    """Gated activation of a decoder, with int8 codes of each row."""
    return _activation(x, hidden, function, has_codes=True)


def _layer(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """The bytes of a KvLayer, [2, slots, KV heads, capacity, bytes]."""
    both = torch.stack([k_cache, v_cache]).transpose(2, 3).contiguous()
    return both.view(torch.uint8)


@kernel("decoder_attention", "decoder-attention", prepare_state=_layer, returns=True)
def attention(
    qkv: torch.Tensor,
    rotary: torch.Tensor,
    position: torch.Tensor,
    codes: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
) -> Tensors:
    """Attention of a decode step over an FP16 cache."""
    to, made = _destination(qkv, heads * head_dim, has_codes=False)
    shape = AttentionShape(heads, kv_heads, head_dim, rotary)
    layer = KvLayer(codes, None, 16)
    _operations(qkv.device.type).attend(qkv, shape, layer, position, context, to)
    return made


def _coded_layer(bits: int, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales of a KvLayer from codes, scales and zero points of keys and of values."""
    keys, values = parts[:3], parts[3:]
    codes, steps, zeros = (
        torch.stack(both).transpose(2, 3) for both in zip(keys, values, strict=True)
    )
    unsigned = codes.to(torch.int32) & (1 << bits) - 1
    packed = unsigned.to(torch.uint8)
    if bits == 4:
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    step = steps.float()
    return packed.contiguous(), torch.cat([step, zeros.float() * step], -1).half().contiguous()


def _attention_over(bits: int) -> FunctionDefinition:
    """Attention of a decode step over a cache of codes."""

    def attention(
        qkv: torch.Tensor,
        rotary: torch.Tensor,
        position: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
    ) -> Tensors:
        to, made = _destination(qkv, heads * head_dim, has_codes=False)
        shape = AttentionShape(heads, kv_heads, head_dim, rotary)
        layer = KvLayer(codes, scales, bits)
        _operations(qkv.device.type).attend(qkv, shape, layer, position, context, to)
        return made

    return kernel(
        "decoder_attention",
        "decoder-attention",
        variant=f"kv{bits}",
        cache=f"uint{bits}/128",
        prepare_state=partial(_coded_layer, bits),
        returns=True,
        summary=f"Attention of a decode step over a cache of {bits}-bit codes.",
    )(attention)


KERNELS = (
    norm_halves,
    norm_codes,
    silu_mul_halves,
    silu_mul_codes,
    attention,
    *map(_attention_over, (8, 4)),
)
