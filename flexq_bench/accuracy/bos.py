"""The token at the beginning of texts (BOS), and its placement in an evaluation.

| placement | tokens | |
| --- | --- | --- |
| segment | before each segment | the default if the tokenizer begins texts with it |
| text | before the first segment only | as in GPTQ's code, and so in the papers' tables of LLaMA |
| none | nowhere | the default otherwise |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import torch

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import perplexity, text_length
from flexq_bench.accuracy.results import Bos
from flexq_bench.accuracy.sampling import Indices, covering_segments, sampled_order
from flexq_bench.accuracy.strata import CHAT, rendered
from flexq_bench.accuracy.texts import Text, drawn_windows
from flexq_bench.errors import one_line
from flexq_bench.stats import MIN_VALUES

_MAX_SEGMENTS = 8  # whose beginnings are evaluated
_MAX_TOKENS = 32  # tokens of each
_MIN_LOSS_NATS = 0.5  # nats per token: a perplexity that is 1.6 times as high without BOS
_MAX_COVERING = 1000  # segments that cover seldom tokens


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Tokens of a text, int64 [T]. bos: token before each segment; None: there is none.

    places: of a sample, each segment's number in the text, in the order of evaluation; documents:
    the number of its document; None: the segments are in the text's order. vocabulary: number of
    different tokens that the samples and segments of a rare stratum contain, and of all texts.
    """

    ids: torch.Tensor
    bos: int | None
    places: Indices | None = None
    documents: Indices | None = None
    vocabulary: tuple[int, int] | None = None

    @property
    def in_order(self) -> torch.Tensor:
        """Return the tokens of whole segments in the text's order."""
        if self.places is None:
            return self.ids
        return self.ids.view(self.places.size, -1)[np.argsort(self.places)].flatten()

    def among_first(self, count: int) -> TextTokens:
        """Return the sample's segments among the first `count` of the text, in the same order."""
        if self.places is None:
            return self
        kept = np.flatnonzero(self.places < count)
        ids = self.ids.view(self.places.size, -1)[kept].flatten()
        documents = None if self.documents is None else self.documents[kept]
        return replace(self, ids=ids, places=self.places[kept], documents=documents)


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


@lru_cache(maxsize=32)  # a gate asks for the same tokens several times
def text_tokens(text: Text, tokenizer: Any, bos: Bos, context: int) -> TextTokens:
    """Tokenize a whole text. bos: result of chosen_bos. context: tokens of a segment with its BOS.

    From drawn windows, the tokens of the windows that fill the segments; with bos "text" each
    document begins with BOS, as in the papers' tables. A text with a seed is a sample: its whole
    segments in random order. Raises AccuracyError as drawn_windows, and for conversations if the
    tokenizer has no chat template.
    """
    token = tokenizer.bos_token_id
    begins = _begins_with_bos(tokenizer)
    before = int(token) if bos == "segment" else None
    length = text_length(text.segment_tokens(context), before)

    def read(content: str) -> list[int]:
        # Texts are longer than any context, so the tokenizer's warning about it is suppressed.
        ids = list(tokenizer(content, verbose=False).input_ids)
        if ids and ids[0] == token and begins:
            ids = ids[1:]
        return [token, *ids] if bos == "text" else ids

    if text.parts:
        return _covering(text, tokenizer, bos, context, length)
    if text.documents:
        windows = drawn_windows(text, read, length)
        return TextTokens(torch.tensor(list(windows), dtype=torch.int64).flatten(), before)
    if text.kind == CHAT:
        pieces = _conversations(text, tokenizer)
        ids = torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64)
        starts = np.cumsum([0, *map(len, pieces)])[:-1]
    else:
        ids = torch.tensor(read(text.content), dtype=torch.int64)
        # About: for a stratified sample it is enough to know roughly where a document begins.
        share = ids.numel() / max(1, len(text.content))
        starts = np.round(np.array(text.starts, dtype=np.float64) * share).astype(np.int64)
    if text.seed is None or ids.numel() < length:
        return TextTokens(ids, before)
    segments = ids[: ids.numel() // length * length].view(-1, length)
    middles = np.arange(len(segments)) * length + length // 2
    documents = np.searchsorted(starts, middles, side="right")
    order = sampled_order(documents, f"{text.seed} {text.content_hash}")
    return TextTokens(segments[order].flatten(), before, order, documents[order])


def _conversations(text: Text, tokenizer: Any) -> Sequence[list[int]]:
    if not getattr(tokenizer, "chat_template", None):
        raise AccuracyError("the tokenizer has no chat template: there is nothing to render")
    try:
        prompts = list(rendered(text, tokenizer.apply_chat_template))
    except Exception as error:  # of a template: any
        raise AccuracyError(f"the chat template fails: {one_line(error)}") from error
    return [tokenizer(p, add_special_tokens=False, verbose=False).input_ids for p in prompts]


def _covering(text: Text, tokenizer: Any, bos: Bos, context: int, length: int) -> TextTokens:
    """Return segments of a text's parts with the tokens that the samples of these parts lack."""
    whole, sampled = [], []
    for part in text.parts:
        try:
            tokens = text_tokens(part, tokenizer, bos, context)
        except AccuracyError:
            continue  # it is not evaluated either
        whole.append(tokens.in_order)
        sampled.append(
            tokens.ids[: MIN_VALUES * text_length(part.segment_tokens(context), tokens.bos)]
        )
    ids = torch.cat(whole) if whole else torch.zeros(0, dtype=torch.int64)
    before = int(tokenizer.bos_token_id) if bos == "segment" else None
    if ids.numel() < length:
        return TextTokens(ids, before)
    vocabulary = int(ids.max()) + 1
    occurring, covered = np.zeros(vocabulary, bool), np.zeros(vocabulary, bool)
    occurring[ids.numpy()] = True
    covered[torch.cat(sampled).numpy()] = True
    covered |= ~occurring
    segments = ids[: ids.numel() // length * length].view(-1, length)
    chosen = covering_segments(segments.numpy(), covered, MIN_VALUES, _MAX_COVERING)
    covered[segments[chosen].numpy().ravel()] = True
    counts = int((covered & occurring).sum()), int(occurring.sum())
    return TextTokens(segments[chosen].flatten(), before, chosen, None, counts)


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
