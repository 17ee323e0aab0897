"""Names of probes, measured besides the kernels: read floors, empty kernel, spin."""

from __future__ import annotations

from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.gemm import GemmWorkload

EMPTY_KERNEL = "empty"
SPIN_KERNEL = "spin"
_FLOOR_PREFIX = "read-"
READ_BITS = 16  # of the floor of operations, which have bytes instead of weights
_READ_K = 4096


def floor_kernel(weight_bits: int, *, overlaps: bool = False) -> str:
    """Return the label of the probe that reads weights of this width: `read-6[overlap]`.

    overlaps: launches of the kernel overlap with the previous one.
    """
    return kernel_label(f"{_FLOOR_PREFIX}{weight_bits}", "overlap" if overlaps else "")


def shape_of_bytes(size: int) -> GemmWorkload:
    """Return the shape at which weights of READ_BITS have about so many bytes."""
    k = min(_READ_K, max(1, size // 2))
    return GemmWorkload(1, max(1, round(size / (2 * k))), k)


def calibrates(kernel: str) -> bool:
    """Return True for probes that calibrate other times; they get no slower or faster verdict.

    A changed floor changes all percentages of it: it distinguishes a slow device from a slow
    kernel.
    """
    return kernel == EMPTY_KERNEL or kernel.startswith(_FLOOR_PREFIX)


def is_probe(kernel: str) -> bool:
    """Return True for a read floor, the empty kernel or the spin: no GEMM, so no operations."""
    return kernel in (EMPTY_KERNEL, SPIN_KERNEL) or kernel.startswith(_FLOOR_PREFIX)
