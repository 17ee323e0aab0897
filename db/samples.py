"""Compressed encoding of raw samples in the `sample` table."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DTYPE = np.dtype("<f8")


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """data: zlib of little-endian float64 samples; placement_counts: samples per placement."""

    data: bytes
    placement_counts: list[int]

    @property
    def count(self) -> int:
        return sum(self.placement_counts)


def pack(samples: Sequence[Sequence[float]]) -> PackedSamples:
    """Encode samples by placement, in measurement order, without loss."""
    flat = np.array([value for placement in samples for value in placement], dtype=_DTYPE)
    return PackedSamples(zlib.compress(flat.tobytes()), [len(p) for p in samples])


def unpack(packed: PackedSamples) -> tuple[tuple[float, ...], ...]:
    """Decode samples by placement: the inverse of `pack`. Raises ValueError if they are damaged."""
    try:
        flat = np.frombuffer(zlib.decompress(packed.data), dtype=_DTYPE)
    except zlib.error as error:
        raise ValueError(f"samples can't be decompressed: {error}") from None
    if len(flat) != packed.count:
        raise ValueError(f"{len(flat)} samples instead of {packed.count}")
    ends = np.cumsum(packed.placement_counts)[:-1]
    return tuple(tuple(part.tolist()) for part in np.split(flat, ends))
