"""Names of probes, measured besides the kernels: read floors, empty kernel, spin."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import HasSize, OperationWorkload, operation

EMPTY_KERNEL = "empty"
SPIN_KERNEL = "spin"
OPERATION_FLOOR_BITS = 8  # of the read floor of operations other than linear
_FLOOR_PREFIX = "read-"
_FLOOR_K = 1024


def floor_kernel(weight_bits: int, *, overlaps: bool = False) -> str:
    """Return the label of the probe that reads weights of this width: `read-6[overlap]`.

    overlaps: launches of the kernel overlap with the previous one.
    """
    return kernel_label(f"{_FLOOR_PREFIX}{weight_bits}", "overlap" if overlaps else "")


def floor_gemm(
    workload: GemmWorkload | OperationWorkload, formats: Mapping[str, HasSize]
) -> GemmWorkload | None:
    """Return the shape that a read floor reads for a workload; None: its bytes are not defined.

    Of a linear layer these are its weights, of other operations the bytes that they must move, in
    codes of 8 bits. formats: of the kernel, by the names of operation.FORMATS. Raises WorkloadError
    if the operation is not known here.
    """
    if isinstance(workload, GemmWorkload):
        return GemmWorkload(1, workload.n, workload.k)
    definition = operation(workload.operation)
    if not definition.bytes:
        return None
    moved = definition.evaluate(definition.bytes, dict(workload.values), formats)
    row = GemmWorkload(1, 1, _FLOOR_K)
    rows = ceil(moved / row.weight_bytes(OPERATION_FLOOR_BITS, None))
    return GemmWorkload(1, max(rows, 1), _FLOOR_K)


def calibrates(kernel: str) -> bool:
    """Return True for probes that calibrate other times; they get no slower or faster verdict.

    A changed floor changes all percentages of it: it distinguishes a slow device from a slow
    kernel.
    """
    return kernel == EMPTY_KERNEL or kernel.startswith(_FLOOR_PREFIX)


def is_probe(kernel: str) -> bool:
    """Return True for a read floor, the empty kernel or the spin: no GEMM, so no operations."""
    return kernel in (EMPTY_KERNEL, SPIN_KERNEL) or kernel.startswith(_FLOOR_PREFIX)
