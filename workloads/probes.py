"""Names of what is measured beside the kernels: the read floors, the empty one, the spin."""

from __future__ import annotations

from workloads.case import kernel_label

EMPTY_KERNEL = "empty"
SPIN_KERNEL = "spin"
_FLOOR_PREFIX = "read-"


def floor_kernel(weight_bits: int, *, overlaps: bool = False) -> str:
    """Label of the probe that reads weights of this width: `read-6`, or `read-6[overlap]`.

    overlaps: a launch starts while the one before still runs.
    """
    return kernel_label(f"{_FLOOR_PREFIX}{weight_bits}", "overlap" if overlaps else "")


def calibrates(kernel: str) -> bool:
    """Whether others are held against it, so that itself it is neither slower nor faster.

    A floor that moves moves what is a share of it, and tells a slow machine from a slow kernel.
    """
    return kernel == EMPTY_KERNEL or kernel.startswith(_FLOOR_PREFIX)


def is_probe(kernel: str) -> bool:
    """Whether it is no GEMM, so it has no operations: a read floor, the empty kernel, the spin."""
    return kernel in (EMPTY_KERNEL, SPIN_KERNEL) or kernel.startswith(_FLOOR_PREFIX)
