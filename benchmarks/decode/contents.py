"""Contents of sequences in timed steps: random, because power depends on the bits that are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.decode.decoder import Chunks
from flexq_bench.decode.engine import Engine
from flexq_bench.kernels.decoder import KvLayer
from flexq_bench.kernels.decoder.kv import encode

_PROMPT = 15  # tokens


def begin_sequences(engine: Engine, batch: int) -> None:
    """Give each sequence a prompt of its own, and all of its cache random keys and values."""
    device = engine.model.device
    vocabulary = engine.model.architecture.dimensions.vocab
    ids = torch.randint(vocabulary, (batch, _PROMPT), dtype=torch.int32, device=device)
    slots = torch.arange(batch, device=device)
    ends = torch.full_like(slots, _PROMPT)
    engine.read(Chunks(ids, torch.zeros_like(slots), ends, slots, _PROMPT), batch)
    fill_randomly(engine.caches, engine.model.attention.head_dim)


def fill_randomly(caches: Sequence[KvLayer], head_dim: int) -> None:
    """Normal keys and values, as a cache of its width has them."""
    for cache in caches:
        shape = (*cache.codes.shape[:4], head_dim)
        x = torch.randn(shape, dtype=torch.float16, device=cache.codes.device)
        codes, scales = encode(x, cache.bits)
        cache.codes.copy_(codes)
        if cache.scales is not None and scales is not None:
            cache.scales.copy_(scales)
