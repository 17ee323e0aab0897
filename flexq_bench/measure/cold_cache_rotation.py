"""Cold-cache rotation: the number of weight copies over which launches rotate."""

from __future__ import annotations

from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.measure.protocol import Protocol
from flexq_bench.workloads.case import CacheMode


def copies_for(
    cache: CacheMode,
    copy_bytes: int,
    l2_bytes: int | None,
    protocol: Protocol,
    *,
    read_bytes: int | None = None,
) -> int:
    """Number of copies of `copy_bytes` bytes each to rotate over.

    read_bytes: of each, which launches must read at least; None: all. cold: together the copies
    exceed cache_factor times the L2, so that each is evicted before it is read again. Small
    weights, which would need very many copies, exceed min_cache_factor times, and so do the bytes
    that are read. hot: one copy, which must fit the L2. A kernel that reads no weights (0 bytes)
    has one. Raises UnsupportedError if weights are too small for cold or too large for hot.
    """
    if copy_bytes == 0:
        return 1
    if cache == "hot":
        if l2_bytes is not None and copy_bytes > l2_bytes:
            raise UnsupportedError(
                f"{copy_bytes:,} bytes of weights do not fit the L2 of {l2_bytes:,} bytes, "
                "so they are never hot: measure this shape cold"
            )
        return 1
    least_bytes = copy_bytes if read_bytes is None else min(copy_bytes, read_bytes)
    needed = protocol.cold_bytes(l2_bytes, protocol.min_cache_factor) // least_bytes + 1
    preferred = protocol.cold_bytes(l2_bytes, protocol.cache_factor) // copy_bytes + 1
    copies = max(needed, min(preferred, protocol.many_copies))
    if copies > protocol.max_launches:
        raise UnsupportedError(
            f"{least_bytes:,} bytes of weights would need {copies:,} copies to be cold and "
            f"{protocol.max_launches:,} is the most: measure this shape hot, or a larger one"
        )
    return copies
