"""Parts of a segment with separate losses, to show losses by a quantized cache far back."""

from __future__ import annotations

MAX_CONTEXT = 1 << 22  # tokens
_SECOND_PART_START = 128  # first position of the second part


def first_positions(context: int) -> tuple[int, ...]:
    """Return the first position of each part of a segment of `context` tokens.

    These are 0, and the powers of two from 128 within the context. A token at position 300 is
    predicted from 300 others.
    """
    powers = (_SECOND_PART_START << shift for shift in range(context.bit_length()))
    return (0, *(power for power in powers if power < context))
