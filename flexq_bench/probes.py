"""Names of what is measured beside the kernels: the read floors, the empty one, the spin."""

from __future__ import annotations

EMPTY_KERNEL = "empty"
SPIN_KERNEL = "spin"
_FLOOR_PREFIX = "read-"


def floor_kernel(weight_bits: int) -> str:
    """The probe that reads weights of this width: `read-6`."""
    return f"{_FLOOR_PREFIX}{weight_bits}"


def is_probe(kernel: str) -> bool:
    """Whether it is no GEMM, so it has no operations: a read floor, the empty kernel, the spin."""
    return kernel in (EMPTY_KERNEL, SPIN_KERNEL) or kernel.startswith(_FLOOR_PREFIX)
