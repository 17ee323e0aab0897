"""Errors of quantized checkpoints."""

from __future__ import annotations

from flexq_bench.errors import UsageError

HEAD = "lm_head.weight"


class CheckpointError(UsageError):
    """A checkpoint that is damaged, of another version or inconsistent; the message is one line."""


def own_head_error(place: object, embedding: str, head: str = HEAD) -> CheckpointError:
    """Return the error for an output head of its own in a model that ties it to an embedding."""
    return CheckpointError(
        f"{place}: {head} is not {embedding}, and config.json says that they are one "
        '("tie_word_embeddings"): set that to false if the model has a head of its own'
    )
