"""Text of prompts and answers: tokens of a text, text of tokens as they come, stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexq_bench.errors import UsageError, library_reason

_INCOMPLETE = "\ufffd"  # what bytes of an incomplete character are decoded to


class Vocabulary:
    """A model's tokenizer. ends: tokens that end an answer."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.ends = ends

    def tokens(self, text: str) -> list[int]:
        """Tokens of a prompt, with those that the tokenizer adds to each text.

        Raises UsageError for text that is not valid Unicode.
        """
        return self._encoded(text)

    def tokens_of_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of messages in the model's chat template, up to the beginning of the answer.

        Raises UsageError if the model has no template, or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise UsageError("the model has no chat template: use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # of any class: a template is a program of the model
            raise UsageError(f"the chat template refuses it: {library_reason(error)}") from error
        return self._encoded(text, add_special_tokens=False)

    def _encoded(self, text: str, **options: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: {error.reason}") from error
        return list(self._tokenizer.encode(text, **options))

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens. special: with special tokens, which are left out otherwise."""
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        )


class GrowingText:
    """The text of tokens that come one at a time. A character is complete before it is returned."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        # The text of a token may depend on the one before, so decoding begins with tokens whose
        # text was returned already.
        self._first, self._returned = 0, 0

    def add(self, token: int) -> str:
        """Append a token; returns the text that it completes."""
        self._tokens.append(token)
        text = self._rest()
        if text.endswith(_INCOMPLETE):
            return ""
        self._first, self._returned = self._returned, len(self._tokens)
        return text

    def end(self) -> str:
        """Return the text of bytes that no token completed."""
        text = self._rest()
        self._first = self._returned = len(self._tokens)
        return text

    def _rest(self) -> str:
        known = self._vocabulary.text(self._tokens[self._first : self._returned])
        return self._vocabulary.text(self._tokens[self._first :])[len(known) :]


class StopStrings:
    """Cut a growing text before the first of these strings, also where tokens share one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._kept = ""  # may be the beginning of a stop string

    def add(self, text: str) -> tuple[str, bool]:
        """Append text; returns what is known to come before any stop string, and if one came."""
        self._kept += text
        places = [place for s in self._strings if (place := self._kept.find(s)) >= 0]
        if places:
            before, self._kept = self._kept[: min(places)], ""
            return before, True
        undecided = max((_overlap(self._kept, string) for string in self._strings), default=0)
        cut = len(self._kept) - undecided
        before, self._kept = self._kept[:cut], self._kept[cut:]
        return before, False

    def end(self) -> str:
        """Return the text that turned out to begin no stop string."""
        before, self._kept = self._kept, ""
        return before


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if string.startswith(text[-length:])), 0)
