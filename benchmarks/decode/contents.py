"""What sequences hold when steps are timed: never zeros, as power depends on the bits read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.decode.decoder import Pieces
from flexq_bench.decode.engine import Engine
from kernels.decoder import KvLayer
from kernels.decoder.kv import encode

_PROMPT = 15  # tokens


def begin_sequences(engine: Engine, batch: int) -> None:
    """Give each sequence a prompt of its own, and all of its cache random keys and values."""
    device = engine.model.device
    vocabulary = engine.model.architecture.dimensions.vocab
    ids = torch.randint(vocabulary, (batch, _PROMPT), dtype=torch.int32, device=device)
    slots = torch.arange(batch, device=device)
    ends = torch.full_like(slots, _PROMPT)
    engine.read(Pieces(ids, torch.zeros_like(slots), ends, slots, _PROMPT), batch)
    fill_randomly(engine.caches, engine.model.attention.head_dim)


def fill_randomly(caches: Sequence[KvLayer], head_dim: int) -> None:
    """Normal keys and values, as a cache of its width has them."""
    for cache in caches:
        for codes, scales in (
            (cache.keys, cache.key_scales),
            (cache.values, cache.value_scales),
        ):
            shape = (*codes.shape[:3], head_dim)
            x = torch.randn(shape, dtype=torch.float16, device=codes.device)
            encoded, encoded_scales = encode(x, cache.bits)
            codes.copy_(encoded)
            if scales is not None and encoded_scales is not None:
                scales.copy_(encoded_scales)
