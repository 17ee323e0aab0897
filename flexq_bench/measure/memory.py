"""Estimate of the memory of a measurement, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from flexq_bench.errors import MeasureError
from flexq_bench.kernels.contract import KernelSpec
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload

# Peak bytes per value while inputs are drawn, quantized and checked: FP32 draws and quotients, FP16
# values, codes; the reference's float64 copies of activations; float64 outputs, magnitudes, errors
# and their temporaries.
_WEIGHT_BYTES = 24
_ACTIVATION_BYTES = 40
_OUTPUT_BYTES = 80
# The reference's float64 copies of a chunk of weights.
_REFERENCE_CHUNK = 1 << 26
_REFERENCE_BYTES = 24


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Largest memory of a measurement, bytes: for drawing and checking inputs, and for weight
    copies.
    """

    drawing: int
    reference: int
    copies: int

    @property
    def total(self) -> int:
        return self.drawing + self.reference + self.copies

    def check(self, available: int, case: Case) -> None:
        """Raise MeasureError if more memory is needed than available."""
        if self.total <= available:
            return
        is_linear = isinstance(case.workload, GemmWorkload)
        raise MeasureError(
            f"{case.label} at {_sizes(case)} would take {_gib(self.total)} "
            f"({_gib(self.drawing)} of inputs and outputs, {_gib(self.copies)} of weight copies, "
            f"{_gib(self.reference)} for the reference) and this device has "
            f"{_gib(available)} free: make {'M, N or K' if is_linear else 'it'} smaller"
        )


def estimate_memory(
    spec: KernelSpec, case: Case, cold_bytes: int | None, *, distinct: bool
) -> MemoryEstimate:
    """Estimate the memory of a measurement of this kernel.

    cold_bytes: size that the weight copies must exceed; None: one copy, the hot cache mode.
    distinct: True if each copy has a content of its own.
    """
    if isinstance(case.workload, OperationWorkload):
        return _of_operation(OperationCase(case.workload, spec), case, cold_bytes, distinct)
    gemm = case.workload
    weights = gemm.weight_bytes(spec.weight.bits, spec.weight.group) if spec.reads_weights else 0
    values = gemm.n * gemm.k
    copies = weights + (cold_bytes or 0)
    # One more than copies, or two; each is kept packed, and as codes for the reference.
    contents = weights + (copies if distinct else weights)
    copies += contents + int(contents * max(1.0, 8 / spec.weight.bits))
    drawing = (
        values * _WEIGHT_BYTES
        + gemm.m * gemm.k * _ACTIVATION_BYTES
        + gemm.m * gemm.n * _OUTPUT_BYTES
    )
    if not spec.reads_weights:
        drawing = 0
    reference = min(values, _REFERENCE_CHUNK) * _REFERENCE_BYTES if drawing else 0
    return MemoryEstimate(drawing, reference, copies)


def _of_operation(
    of: OperationCase, case: Case, cold_bytes: int | None, distinct: bool
) -> MemoryEstimate:
    streamed = of.bytes_of(of.streamed(case.cache))
    copies = streamed + (cold_bytes or 0)
    contents = streamed + (copies if distinct else streamed)
    drawing = of.values_in_all * _ACTIVATION_BYTES
    return MemoryEstimate(drawing, of.values_in_all * _REFERENCE_BYTES, copies + 2 * contents)


def _sizes(case: Case) -> str:
    if isinstance(case.workload, GemmWorkload):
        gemm = case.workload
        return f"M={gemm.m:,} N={gemm.n:,} K={gemm.k:,}"
    return case.workload.key


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
