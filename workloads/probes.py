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
    """Return True if kernels are compared with it, so that it is itself neither slower nor faster.

    If a floor changes, every percentage of it changes; it distinguishes a slow machine from a slow
    kernel.
    """
    return kernel == EMPTY_KERNEL or kernel.startswith(_FLOOR_PREFIX)


def is_probe(kernel: str) -> bool:
    """Return True for a read floor, the empty kernel or the spin: no GEMM, so no operations."""
    return kernel in (EMPTY_KERNEL, SPIN_KERNEL) or kernel.startswith(_FLOOR_PREFIX)
