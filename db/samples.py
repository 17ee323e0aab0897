"""Raw samples as the bytes that the `sample` table keeps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DTYPE = np.dtype("<f8")


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """data: zlib of little-endian float64; placement_counts: how many belong to each placement."""

    data: bytes
    placement_counts: list[int]

    @property
    def count(self) -> int:
        return sum(self.placement_counts)


def pack(samples: Sequence[Sequence[float]]) -> PackedSamples:
    """Samples by placement, in the order measured; every bit is kept."""
    flat = np.array([value for placement in samples for value in placement], dtype=_DTYPE)
    return PackedSamples(zlib.compress(flat.tobytes()), [len(p) for p in samples])


def unpack(packed: PackedSamples) -> tuple[tuple[float, ...], ...]:
    """The samples by placement that `pack` was given."""
    flat = np.frombuffer(zlib.decompress(packed.data), dtype=_DTYPE)
    ends = np.cumsum(packed.placement_counts)[:-1]
    return tuple(tuple(part.tolist()) for part in np.split(flat, ends))
