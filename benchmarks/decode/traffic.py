"""Bytes that a decode step must read, which bound its time from below."""

from __future__ import annotations

from flexq_bench.decode.architecture import Architecture
from flexq_bench.decode.loading import footprint
from workloads.schemes import Scheme


def step_bytes(
    architecture: Architecture, scheme: Scheme, batch: int, tokens: int, kv_bits: int
) -> int:
    """Bytes of weights, and of keys and values of `tokens` a sequence, each once.

    Of the embedding a step reads a row a sequence, which is left out.
    """
    size = footprint(architecture, scheme, batch, tokens, kv_bits, "cpu")
    of_model = architecture.dimensions
    unread = 0 if of_model.tied_embeddings else of_model.vocab * of_model.hidden * 2
    return size.weights + size.cache - unread
