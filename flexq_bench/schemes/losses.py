"""Losses of the learned schemes: distances of a quantized block from the original one.

ABQ-LLM (Zeng et al., arXiv 2408.08554), section 3.2: the double logarithm of cosine similarity
(DLC) of the block's outputs, and the attention-aware divergence (AKL) of its attention maps.
OmniQuant (arXiv 2308.13137, section 3.1, equation 1) takes the mean squared error of the outputs,
which is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flexq_bench.schemes.training_kernels import kernels_for

_TINY = 1e-9  # keeps the logarithm finite for masked positions, whose probability is 0
_AT_ONCE = 4096  # probabilities per program of the kernel


def double_log_cosine(
    quantized: torch.Tensor, original: torch.Tensor, original_here: torch.Tensor
) -> torch.Tensor:
    """Return -log cos(quantized, original) - log cos(quantized, original_here), a scalar >= 0.

    All [..., tokens, hidden]: outputs of the quantized block, of the original block in the original
    model, and of the original block on the quantized block's inputs. A cosine is the mean over
    tokens. It is kept above zero, so that the loss stays finite for a very bad block.
    """
    total = torch.zeros((), device=quantized.device)
    for reference in (original, original_here):
        cosine = functional.cosine_similarity(quantized, reference, dim=-1).mean()
        total = total - torch.log(cosine.clamp(min=_TINY))
    return total


def attention_divergence(quantized: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return KL(quantized || original) + KL(original || quantized), a scalar >= 0, in nats.

    Attention probabilities [..., queries, keys]; the mean over heads and queries. `original` gets
    no gradient.
    """
    if kernels_for(quantized) is not None and original.dtype == quantized.dtype:
        fused: torch.Tensor = _Divergence.apply(quantized, original)  # type: ignore[no-untyped-call]
        return fused
    ratio = torch.log(quantized + _TINY) - torch.log(original + _TINY)
    return ((quantized - original) * ratio).sum(dim=-1).mean()


class _Divergence(torch.autograd.Function):
    """attention_divergence in one pass over the maps, and its gradient in a second one."""

    @staticmethod
    def forward(ctx: Any, quantized: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
        p, q = quantized.contiguous(), original.contiguous()
        ctx.save_for_backward(p, q)
        programs = -(-p.numel() // _AT_ONCE)
        parts = torch.empty(programs, dtype=p.dtype, device=p.device)
        kernel = kernels_for(p).divergence
        kernel[(programs,)](p, q, parts, p.numel(), _TINY, block=_AT_ONCE)
        return parts.sum() / (p.numel() // p.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, q = ctx.saved_tensors
        factor = gradients[0] / (p.numel() // p.shape[-1])
        gradient = torch.empty_like(p)
        kernel = kernels_for(p).divergence_backward
        programs = -(-p.numel() // _AT_ONCE)
        kernel[(programs,)](p, q, factor, gradient, p.numel(), _TINY, block=_AT_ONCE)
        return gradient, None
