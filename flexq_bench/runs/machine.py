"""The device of an interleaved comparison, and the series that its times belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexq_bench.db.records import TIME_METRICS, DeviceInfo
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import format_values
from flexq_bench.workloads.probes import is_probe

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import Backend


@dataclass(frozen=True, slots=True)
class Machine:
    """An implementation of flexq_bench.verdicts.nightly.ComparisonDevice.

    project: of the compared commits; empty: this repository.
    """

    backend: Backend
    device: DeviceInfo
    project: str = ""

    def series_of(self, case: Case) -> dict[str, Any]:
        """Return the identity of the series of the case's times on this device.

        It equals that of a measurement's record (see flexq_bench.runs.record). Raises KernelError
        for a kernel that the backend doesn't have.
        """
        # Imported here, because reading verdicts needs neither torch nor the kernels.
        from flexq_bench.kernels.registry import resolve
        from flexq_bench.measure.inputs import INPUT_DISTRIBUTION
        from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA
        from flexq_bench.measure.subject import PROBE_DISTRIBUTION

        gemm = case.workload if isinstance(case.workload, GemmWorkload) else None
        spec = resolve(case.label, self.backend).spec
        protocol = PROTOCOL_CPU if self.backend == "cpu" else PROTOCOL_CUDA
        return {
            "kernel": case.kernel,
            "kernel_version": spec.version,
            "variant": case.variant,
            "backend": self.backend,
            "stage": case.stage,
            "cache": case.cache,
            "metric": TIME_METRICS[case.regime],
            "unit": "us",
            "direction": "lower",
            "operation": case.operation,
            "parameters": format_values(case.workload.values, " "),
            **{name: None if gemm is None else getattr(gemm, name) for name in "mnk"},
            "weight_bits": spec.weight.bits,
            "act_bits": spec.activation.bits,
            "group": spec.weight.group,
            "input_distribution": (
                PROBE_DISTRIBUTION if is_probe(case.kernel) else INPUT_DISTRIBUTION
            ),
            "protocol_version": protocol.version,
            "gpu": self.device.sku,
        } | ({"project": self.project} if self.project else {})
