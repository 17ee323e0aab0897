"""What learned schemes minimise: how far a quantized block is from the original one.

ABQ-LLM (Zeng et al., arXiv 2408.08554), section 3.2: the double logarithm of cosine similarity
(DLC) of the block's outputs, and the attention-aware divergence (AKL) of its attention maps.
OmniQuant (arXiv 2308.13137, section 3.1, equation 1) takes the mean squared error of the outputs,
which is torch's own.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_TINY = 1e-9  # keeps the logarithm of a masked position's probability finite


def double_log_cosine(
    quantized: torch.Tensor, original: torch.Tensor, original_here: torch.Tensor
) -> torch.Tensor:
    """-log cos(quantized, original) - log cos(quantized, original_here), a scalar >= 0.

    All [..., tokens, hidden]: outputs of the quantized block, of the original block in the original
    model, and of the original block on the quantized block's inputs. A cosine is the mean over
    tokens; it is held above zero so that the loss stays finite when a block is destroyed.
    """
    total = torch.zeros((), device=quantized.device)
    for reference in (original, original_here):
        cosine = functional.cosine_similarity(quantized, reference, dim=-1).mean()
        total = total - torch.log(cosine.clamp(min=_TINY))
    return total


def attention_divergence(quantized: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """KL(quantized || original) + KL(original || quantized), a scalar >= 0, in nats.

    Attention probabilities [..., queries, keys]; the mean over heads and queries.
    """
    ratio = torch.log(quantized + _TINY) - torch.log(original + _TINY)
    return ((quantized - original) * ratio).sum(dim=-1).mean()
