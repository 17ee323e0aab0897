"""Compressed encoding of raw samples in the tables of samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

_DTYPE = np.dtype("<f8")


def pack(samples: Sequence[Sequence[float]]) -> bytes:
    """Return zlib of little-endian float64: samples by placement, in measurement order."""
    flat = np.array([value for placement in samples for value in placement], dtype=_DTYPE)
    return zlib.compress(flat.tobytes())


def unpack(data: bytes, counts: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return the samples that `pack` encoded, by placement. counts: samples of each placement.

    Raises ValueError if they are damaged.
    """
    try:
        flat = np.frombuffer(zlib.decompress(data), dtype=_DTYPE)
    except zlib.error as error:
        raise ValueError(f"samples can't be decompressed: {error}") from None
    if len(flat) != sum(counts):
        raise ValueError(f"{len(flat)} samples instead of {sum(counts)}")
    return tuple(tuple(part.tolist()) for part in np.split(flat, np.cumsum(counts)[:-1]))
