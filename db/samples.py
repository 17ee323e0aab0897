"""Compressed encoding of raw samples in the tables of samples."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise


def pack(samples: Sequence[Sequence[float]]) -> bytes:
    """Return zlib of little-endian float64: samples by placement, in measurement order."""
    flat = array("d", (value for placement in samples for value in placement))
    return zlib.compress(_little_endian(flat).tobytes())


def unpack(data: bytes, counts: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return the samples that `pack` encoded, by placement. counts: samples of each placement.

    Raises ValueError if they are damaged.
    """
    flat = array("d")
    try:
        flat.frombytes(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(f"samples can't be decompressed: {error}") from None
    if len(flat) != sum(counts):
        raise ValueError(f"{len(flat)} samples instead of {sum(counts)}")
    values = tuple(_little_endian(flat))
    return tuple(values[start:end] for start, end in pairwise(accumulate(counts, initial=0)))


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
