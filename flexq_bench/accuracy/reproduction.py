"""Evaluation of the original, quantized by a scheme, on as many segments as requested."""

from __future__ import annotations

from typing import Any

from flexq_bench.accuracy.agreement import Agreement, AgreementMeter, ReferenceLogits
from flexq_bench.accuracy.bos import TextTokens
from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity, text_length


class Reproduction:
    """A model under a scheme on the first segments of a text, each of them computed once.

    reference: the original's predictions on these segments, which may grow.
    """

    def __init__(self, scheme: str, text: str, model: Any, reference: ReferenceLogits) -> None:
        self.scheme, self.text = scheme, text
        self._model = model
        self._meter = AgreementMeter(reference)
        self._result: PerplexityResult | None = None

    def first(self, tokens: TextTokens, count: int, context: int) -> PerplexityResult:
        """Its perplexity on the first `count` segments, 1 or more, or on more that it knows."""
        done = 0 if self._result is None else len(self._result.nll)
        if self._result is None or count > done:
            length = text_length(context, tokens.bos)
            more = perplexity(
                self._model,
                tokens.ids[done * length : count * length],
                context=context,
                on_logits=self._meter,
                bos=tokens.bos,
            )
            self._result = more if self._result is None else self._result.followed_by(more)
        return self._result

    def agreement(self) -> Agreement:
        """Return the agreement with the original on the segments evaluated so far."""
        return self._meter.result()
