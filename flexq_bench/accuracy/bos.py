"""The token at the beginning of texts (BOS), and its placement in an evaluation.

| placement | tokens | |
| --- | --- | --- |
| segment | before each segment | the default if the tokenizer begins texts with it |
| text | before the first segment only | as in GPTQ's code, and so in the papers' tables of LLaMA |
| none | nowhere | the default otherwise |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import perplexity, text_length
from flexq_bench.accuracy.results import Bos
from flexq_bench.accuracy.texts import Text, drawn_windows

_MAX_SEGMENTS = 8  # whose beginnings are evaluated
_MAX_TOKENS = 32  # tokens of each
_MIN_LOSS_NATS = 0.5  # nats per token: a perplexity that is 1.6 times as high without BOS


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Tokens of a text, int64 [T]. bos: token before each segment; None: there is none."""

    ids: torch.Tensor
    bos: int | None


def as_bos(name: str | None) -> Bos | None:
    """Parse the name of a Bos; None stays None. Raises AccuracyError for an unknown name."""
    if name is not None and name not in get_args(Bos):
        raise AccuracyError(f"--bos {name}: give {', '.join(get_args(Bos))}")
    return name  # type: ignore[return-value]


def chosen_bos(requested: Bos | None, tokenizer: Any) -> Bos:
    """Return the placement of BOS; requested None: the tokenizer's own setting (`add_bos_token`).

    Raises AccuracyError if BOS is requested and the tokenizer has none.
    """
    if requested is None:
        return "segment" if _begins_with_bos(tokenizer) else "none"
    if requested != "none" and tokenizer.bos_token_id is None:
        raise AccuracyError(f"--bos {requested}: the tokenizer has no such token: give --bos none")
    return requested


def text_tokens(text: Text, tokenizer: Any, bos: Bos, context: int) -> TextTokens:
    """Tokenize a whole text. bos: result of chosen_bos. context: tokens of a segment with its BOS.

    From drawn windows, the tokens of the windows that fill the segments; with bos "text" each
    document begins with BOS, as in the papers' tables. Raises AccuracyError as drawn_windows.
    """
    token = tokenizer.bos_token_id
    begins = _begins_with_bos(tokenizer)

    def read(content: str) -> list[int]:
        # Texts are longer than any context, so the tokenizer's warning about it is suppressed.
        ids = list(tokenizer(content, verbose=False).input_ids)
        if ids and ids[0] == token and begins:
            ids = ids[1:]
        return [token, *ids] if bos == "text" else ids

    before = int(token) if bos == "segment" else None
    if text.documents:
        windows = drawn_windows(text, read, text_length(context, before))
        return TextTokens(torch.tensor(list(windows), dtype=torch.int64).flatten(), before)
    return TextTokens(torch.tensor(read(text.content), dtype=torch.int64), before)


def first_tokens_warning(model: Any, tokenizer: Any, tokens: TextTokens) -> str | None:
    """Return a warning if a model evaluated without BOS appears to need it; None: no warning.

    A model that was trained with BOS at the start of its texts predicts the first tokens of each
    segment far worse without it. This compares the losses with and without BOS on the beginnings of
    a few segments, from their second token on.
    """
    token = tokenizer.bos_token_id
    if token is None:
        token = getattr(model.config, "bos_token_id", None)
    length = min(_MAX_TOKENS, tokens.ids.numel())
    if tokens.bos is not None or not isinstance(token, int) or length < 2:
        return None
    count = min(_MAX_SEGMENTS, tokens.ids.numel() // length)
    starts = torch.arange(count) * (tokens.ids.numel() // count)
    beginnings = torch.stack([tokens.ids[start : start + length] for start in starts.tolist()])
    without = perplexity(model, beginnings.flatten(), context=length)
    # Both predict the same tokens, except the first one, which has no predecessor without BOS.
    losses: list[float] = []

    def keep(segment: int, logits: torch.Tensor) -> None:
        wanted = beginnings[segment][1:].to(logits.device)
        chosen = logits[1:].float().log_softmax(-1).gather(1, wanted[:, None])
        losses.append(-float(chosen.mean()))

    perplexity(model, beginnings.flatten(), context=length + 1, bos=token, on_logits=keep)
    saved = without.mean_nll - sum(losses) / len(losses)
    if not saved > _MIN_LOSS_NATS:
        return None
    asks = "asks" if _begins_with_bos(tokenizer) else "does not ask"
    return (
        f"the first {length} tokens of a segment lose {saved:.2f} nats each for want of a BOS "
        f"token ({token}), which the tokenizer {asks} for: this model looks trained with one; "
        "evaluate with --bos segment"
    )


def _begins_with_bos(tokenizer: Any) -> bool:
    token = tokenizer.bos_token_id
    if token is None:
        return False
    ids = tokenizer("a").input_ids
    return (bool(ids) and ids[0] == token) or getattr(tokenizer, "add_bos_token", False) is True
