"""Result of one measurement, before it is tied to a run and a commit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flexq_bench.kernels.contract import KernelSpec
from flexq_bench.workloads.case import Regime


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured part of a db.records.Record: same names, same meanings, same units.

    median_us, placement_medians_us: on a GPU trimmed means, on a CPU medians (Protocol.trim).
    regime: of the times; sample_gap_us: idle time before each sample. launch_j: energy of a launch;
    None: not under steady load, or not available. source_hash: of the sources of an external
    kernel; None: one of ours. extra: other stored values: copies and launches of a sample, indices
    of invalid samples, device states before and after, other processes on the GPU, seconds of each
    step, and the secret from which changing inputs were drawn.
    """

    status: str  # one of db.records.STATUSES
    detail: str  # the reason, if the status is not ok
    seed: int
    protocol_version: int
    input_distribution: str
    kernel_version: int = 0  # 0 and no bits: the registry has no such kernel on this backend
    weight_bits: int = 0
    act_bits: int = 0
    group: int | None = None
    regime: Regime = "boost"
    sample_gap_us: float | None = None
    launch_j: float | None = None
    median_us: float | None = None
    ci_low_us: float | None = None
    ci_high_us: float | None = None
    n_samples: int = 0
    placement_medians_us: tuple[float, ...] = ()
    samples_us: tuple[tuple[float, ...], ...] = ()
    floor_us: float | None = None
    launch_us: float | None = None
    max_rel_error: float | None = None
    exact: bool | None = None
    config: dict[str, Any] = field(default_factory=dict)
    binary_hash: str | None = None
    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_mask: int | None = None
    n_invalid: int = 0
    source_hash: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def of_kernel(self, spec: KernelSpec) -> Measured:
        """The same result with the values of the kernel that identify a series."""
        return replace(
            self,
            kernel_version=spec.version,
            weight_bits=spec.weight.bits,
            act_bits=spec.activation.bits,
            group=spec.weight.group,
            source_hash=spec.source_hash,
        )

    @property
    def is_comparable(self) -> bool:
        """True if its time may be compared: correct, timed, and at a valid device clock."""
        return self.status in ("ok", "noisy") and self.median_us is not None
