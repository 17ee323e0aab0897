"""What a verdict is made from: a case of two commits that took turns on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from db.records import DeviceInfo
from flexq_bench.verdicts.confirmation import Comparison
from workloads.case import Case
from workloads.probes import is_probe

if TYPE_CHECKING:
    from kernels.contract import Backend


class Compared(Protocol):
    """Fields of flexq_bench.measure.ab.CaseComparison.

    base, head: full shas. base_binary, head_binary: hash of the machine code; None: not ours, or
    it never ran. detail: why there is no data, or what is wrong; else empty.
    """

    @property
    def case(self) -> Case: ...
    @property
    def base(self) -> str: ...
    @property
    def head(self) -> str: ...
    @property
    def comparison(self) -> Comparison: ...
    @property
    def base_binary(self) -> str | None: ...
    @property
    def head_binary(self) -> str | None: ...
    @property
    def base_config(self) -> dict[str, Any]: ...
    @property
    def head_config(self) -> dict[str, Any]: ...
    @property
    def detail(self) -> str: ...


Comparer = Callable[[Sequence[Case]], Iterator[Compared]]


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that both commits ran on."""

    backend: Backend
    device: DeviceInfo

    def series_of(self, case: Case) -> dict[str, Any]:
        """The identity of the series that the case's times are in on this device.

        Raises KernelError for a kernel that this backend has not.
        """
        # torch and all kernels: who only reads verdicts does not wait for them.
        from flexq_bench.measure.inputs import INPUT_DISTRIBUTION
        from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA
        from flexq_bench.measure.subject import PROBE_DISTRIBUTION
        from kernels.registry import resolve

        spec = resolve(case.label, self.backend).spec
        protocol = PROTOCOL_CPU if self.backend == "cpu" else PROTOCOL_CUDA
        return {
            "kernel": case.kernel,
            "kernel_version": spec.version,
            "variant": case.variant,
            "backend": self.backend,
            "stage": case.stage,
            "cache": case.cache,
            "metric": "time",
            "unit": "us",
            "direction": "lower",
            "m": case.gemm.m,
            "n": case.gemm.n,
            "k": case.gemm.k,
            "weight_bits": spec.weight.bits,
            "act_bits": spec.activation.bits,
            "group": spec.weight.group,
            "input_distribution": (
                PROBE_DISTRIBUTION if is_probe(case.kernel) else INPUT_DISTRIBUTION
            ),
            "protocol_version": protocol.version,
            "gpu": self.device.sku,
        }
