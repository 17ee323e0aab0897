"""Parts of a segment whose losses are kept apart, so that a cache's loss far back is seen."""

from __future__ import annotations

LONGEST_CONTEXT = 1 << 22  # tokens
_SECOND = 128  # where the second part begins


def first_positions(context: int) -> tuple[int, ...]:
    """The position that each part of a segment of `context` tokens begins with.

    0, then the powers of two from 128 that the context has: a token at position 300 is predicted
    from 300 others.
    """
    powers = (_SECOND << shift for shift in range(context.bit_length()))
    return (0, *(power for power in powers if power < context))
