"""Texts that end in a loop."""

from __future__ import annotations

from collections.abc import Sequence


def loops(tokens: Sequence[object]) -> bool:
    """Return True if a text ends with four or more equal blocks of up to 16 tokens.

    A block of one token counts from eight on: punctuation may be repeated.
    """
    for length in range(1, min(16, len(tokens) // 4) + 1):
        repeats = 8 if length == 1 else 4
        tail = tokens[-length * repeats :]
        if len(tail) == length * repeats and tail[length:] == tail[:-length]:
            return True
    return False
