"""Names of what is measured beside the kernels: the read floors and the empty kernel."""

from __future__ import annotations

EMPTY_KERNEL = "empty"
_FLOOR_PREFIX = "read-"


def floor_kernel(weight_bits: int) -> str:
    """The probe that reads weights of this width: `read-6`."""
    return f"{_FLOOR_PREFIX}{weight_bits}"


def is_probe(kernel: str) -> bool:
    """Whether it is a read floor or the empty kernel: no GEMM, so it has no operations."""
    return kernel == EMPTY_KERNEL or kernel.startswith(_FLOOR_PREFIX)
