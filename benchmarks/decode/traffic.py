"""Bytes that a decode step must read, which bound its time from below."""

from __future__ import annotations

from flexq_bench.decode.loading import footprint
from flexq_bench.decode.weights import WeightSource


def step_bytes(source: WeightSource, batch: int, tokens: int, kv_bits: int) -> int:
    """Bytes of weights, and of keys and values of `tokens` a sequence, each once.

    Of the embedding a step reads a row a sequence, which is left out.
    """
    size = footprint(source, batch, tokens, kv_bits)
    of_model = source.architecture.dimensions
    unread = 0 if of_model.tied_embeddings else of_model.vocab * of_model.hidden * 2
    return size.weights + size.cache - unread
