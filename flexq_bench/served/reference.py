"""Divergence of an engine's predictions from our own evaluation of a checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.setup import best_device, load_either
from flexq_bench.measure.device import find_device
from flexq_bench.served.client import Request, TokenLogprob
from flexq_bench.served.divergence import summed_divergence
from flexq_bench.served.paired import PairedAnswers

# A field that vLLM knows, and that others ignore: two tokens may have one text.
TOKENS_AS_IDS: Mapping[str, object] = {"return_tokens_as_token_ids": True}
_ID = re.compile(r"token_id:(\d+)")


class CheckpointReference:
    """A checkpoint, or a model of transformers, that predicts what engines were asked.

    Raises UsageError if it can't be loaded.
    """

    def __init__(self, source: str) -> None:
        self._loaded = load_either(source, device=find_device(best_device()))
        self.name, self.content_hash = self._loaded.name, self._loaded.content_hash
        self._tokenizer = self._loaded.tokenizer
        self._ids: dict[str, set[int]] = defaultdict(set)
        for piece, token in self._tokenizer.get_vocab().items():
            self._ids[piece].add(token)
            self._ids[self._tokenizer.decode([token])].add(token)

    def compare(self, answers: PairedAnswers, top: int) -> None:
        """Add the divergences of both engines' kept predictions, and drop these."""
        asking = answers.paired.asking
        for name, kept in answers.predictions.items():
            for i, tokens in kept.items():
                request = answers.paired.suite.request(i, asking)
                answers.divergences[name][i] = self.divergence(request, tokens, top)
            kept.clear()

    def divergence(
        self, request: Request, tokens: Sequence[TokenLogprob], top: int
    ) -> tuple[float, int] | None:
        """Return the sum of KL(checkpoint || engine) in nats over positions, and their number.

        tokens: of the engine's answer to the request. Positions are those before the first token
        that the tokenizer does not know. None: there is none.
        """
        known: list[int] = []
        for token in tokens:
            number = self._number(token.token)
            if number is None:
                break
            known.append(number)
        prompt = self._prompt(request)
        positions = getattr(self._loaded.model.config, "max_position_embeddings", None)
        known = known[: max(0, (positions or len(prompt) + len(known)) - len(prompt))]
        if not known or not prompt:
            return None
        ours = [_described(row, top) for row in self._predictions(prompt, known)]
        return summed_divergence(zip(ours, map(self._renamed, tokens[: len(known)]), strict=True))

    def _number(self, text: str) -> int | None:
        """Return the token of a name; None: several have it, or none."""
        if match := _ID.fullmatch(text):
            return int(match[1]) if int(match[1]) < len(self._tokenizer) else None
        numbers = self._ids.get(text, ())
        return next(iter(numbers)) if len(numbers) == 1 else None

    def _renamed(self, token: TokenLogprob) -> TokenLogprob:
        numbers = {name: self._number(name) for name in token.top}
        top = {str(numbers[name]): p for name, p in token.top.items() if numbers[name] is not None}
        return TokenLogprob(str(self._number(token.token)), token.logprob, top)

    def _prompt(self, request: Request) -> list[int]:
        prompt: Any = request.prompt
        if not request.is_chat:
            return list(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
        if not self._tokenizer.chat_template:
            raise AccuracyError(f"{self.name} has no chat template: leave chat out")
        text = self._tokenizer.apply_chat_template(
            list(map(dict, prompt)), tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _predictions(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]: log-probabilities at the position of each token of an answer."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self._loaded.device)
        with torch.inference_mode():
            logits = self._loaded.model(ids, logits_to_keep=len(tokens)).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def _described(row: torch.Tensor, count: int) -> TokenLogprob:
    best = row.topk(min(count, row.numel()))
    top = dict(zip(map(str, best.indices.tolist()), best.values.tolist(), strict=True))
    return TokenLogprob(next(iter(top)), None, top)
