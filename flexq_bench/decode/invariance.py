"""Decodes whose logits depend on the sequence alone: their kernels, and hashes of logits."""

from __future__ import annotations

import hashlib

import torch

from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import linear_kernel
from flexq_bench.errors import UsageError
from flexq_bench.kernels.contract import Backend, LinearKernel
from flexq_bench.kernels.decoder.invariant import fixed_order_gemm, is_exact


def invariant_kernel(label: str, backend: Backend) -> LinearKernel:
    """The linear layer kernel of this label, or for FP16 weights one with a fixed order of sums.

    Raises UsageError if the kernel adds rounded products, or the backend has none.
    """
    kernel = linear_kernel(label, backend)
    spec = kernel.spec
    if spec.weight.is_dense and spec.activation.is_dense:
        return fixed_order_gemm(spec, backend)
    if not is_exact(spec.weight, spec.activation):
        raise UsageError(
            f"{label} adds rounded products, so its sums depend on their order: --invariant takes "
            "fp16, dual-w6a8, dgq-w4a8, smoothquant-w8a8 and abq"
        )
    return kernel


def logits_hash(engine: Engine, prompts: torch.Tensor, new: int) -> str:
    """SHA-256 of the logits of prompts int32 [B, T] and of every step, sequence after sequence."""
    passes: list[torch.Tensor] = []
    engine.generate(prompts, new, lambda position, logits: passes.append(logits.cpu().clone()))
    return sha256_of(torch.stack(passes, dim=1))


def sha256_of(logits: torch.Tensor) -> str:
    """SHA-256 of the bytes of FP16 logits, in the order of their dimensions."""
    return hashlib.sha256(logits.contiguous().cpu().numpy().tobytes()).hexdigest()
