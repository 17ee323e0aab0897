"""References for comparisons: the original's predictions, in memory or in a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from flexq_bench.accuracy.agreement import ReferenceLogits, record_reference
from flexq_bench.accuracy.bos import TextTokens, chosen_bos, text_tokens
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.perplexity import segment_count, text_length
from flexq_bench.accuracy.results import Bos
from flexq_bench.accuracy.texts import Text


class ReferencePredictions(Protocol):
    """Predictions on texts. content_hash: of the model that made them, or of their file."""

    name: str
    content_hash: str
    model: LoadedModel | None  # None: only its predictions are available

    def predictions(self, text: Text, tokens: TextTokens, count: int) -> ReferenceLogits:
        """Return the predictions on at least the first `count` segments of a text.

        Raises AccuracyError if there are none of this text with these tokens.
        """
        ...

    def known(self, text: Text) -> ReferenceLogits | None:
        """Return the predictions on a text that exist so far; None: there are none."""
        ...


class ModelReference:
    """The predictions of a model in memory, computed as far as requested.

    on_segment: may be set; called for each computed segment with the text, segments so far and
    requested.
    """

    def __init__(self, model: LoadedModel, *, context: int, bos: Bos | None) -> None:
        """bos: as requested for the evaluation, see chosen_bos."""
        self.name, self.content_hash = model.name, model.content_hash
        self.model: LoadedModel | None = model
        self._model, self._context = model, context
        self._bos = chosen_bos(bos, model.tokenizer)
        self._tokens: dict[str, TextTokens] = {}
        self._known: dict[str, ReferenceLogits] = {}
        self.on_segment: Callable[[str, int, int], None] | None = None

    def predictions(self, text: Text, tokens: TextTokens, count: int) -> ReferenceLogits:
        """See ReferencePredictions."""
        if text.name not in self._tokens:
            self._tokens[text.name] = text_tokens(
                text, self._model.tokenizer, self._bos, self._context
            )
        own = self._tokens[text.name]
        check_same_tokens(self.name, own, tokens)
        known = self._known.get(text.name)
        done = 0 if known is None else len(known.hidden)
        if known is not None and done >= count:
            return known
        context = text.segment_tokens(self._context)
        length = text_length(context, own.bos)
        more = record_reference(
            self._model.model,
            own.ids[done * length : count * length],
            context=context,
            bos=own.bos,
            on_segment=partial(self._computed, text.name, done, count),
        )
        if known is None:
            self._known[text.name] = more
        else:
            known.extend(more)
        return self._known[text.name]

    def known(self, text: Text) -> ReferenceLogits | None:
        """See ReferencePredictions."""
        return self._known.get(text.name)

    def _computed(self, text: str, before: int, count: int, index: int) -> None:
        if self.on_segment is not None:
            self.on_segment(text, before + index + 1, count)


def check_stored(
    stored: LoadedModel,
    name: str,
    tokens: TextTokens,
    text: Text,
    context: int,
    bos: Bos | None,
) -> None:
    """Raise AccuracyError if a checkpoint can't read segments of a text as its original does.

    name, tokens: of the original, and the text as that tokenizes it.
    """
    stored.context(context)
    own = text_tokens(text, stored.tokenizer, chosen_bos(bos, stored.tokenizer), context)
    check_same_tokens(name, tokens, own)


def check_same_tokens(name: str, own: TextTokens, others: TextTokens) -> None:
    """Raise AccuracyError if a model tokenizes a text differently than its reference."""
    if own.bos != others.bos:
        raise AccuracyError(
            f"its tokenizer begins a segment with {_bos(others.bos)}, that of {name} with "
            f"{_bos(own.bos)}: put the original's tokenizer files next to the weights"
        )
    if own.ids.equal(others.ids):
        return
    shorter = min(own.ids.numel(), others.ids.numel())
    differing = (own.ids[:shorter] != others.ids[:shorter]).nonzero()
    place = int(differing[0]) if differing.numel() else shorter
    raise AccuracyError(
        f"its tokenizer reads the text as other tokens than that of {name}, from token {place} on: "
        "put the original's tokenizer files next to the weights"
    )


def segments_of(tokens: TextTokens, context: int, max_tokens: int | None) -> int:
    """Return the number of segments of a text. Raises AccuracyError as segment_count."""
    return segment_count(tokens.ids.numel(), context, max_tokens, bos=tokens.bos)


def _bos(token: int | None) -> str:
    return "no BOS" if token is None else f"BOS ({token})"
