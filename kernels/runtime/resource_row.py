"""Resources of one function of a build on a target, and its occupancy."""

from __future__ import annotations

from dataclasses import dataclass

from flexq_bench.kernels.runtime.machine_code import Resources
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.kernels.runtime.occupancy import occupancy


@dataclass(frozen=True, slots=True, order=True)
class ResourceRow:
    """Resources of one function of one build for one target (see Resources for the units).

    threads, dynamic_bytes: per block (see Block). blocks_per_sm, warps_per_sm: resident ones; 0:
    not even one block fits, so `candidates` omits the configuration on this target. None: the
    build defines no launch parameters for this function.
    """

    build: str
    target: str
    function: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    threads: int | None
    dynamic_bytes: int | None
    blocks_per_sm: int | None
    warps_per_sm: int | None

    @property
    def fits(self) -> bool:
        """True if a block fits on an SM of the target, or if its launch parameters are unknown."""
        return self.blocks_per_sm != 0


def resource_row(build: Build, target: str, function: str, usage: Resources) -> ResourceRow:
    """Return the resources and occupancy of one function of a build.

    Raises UnsupportedError for an unknown target.
    """
    usages = (usage.registers, usage.stack_bytes, usage.local_bytes, usage.shared_bytes)
    block = build.block
    if block is None or block.function != function:
        return ResourceRow(build.name, target, function, *usages, None, None, None, None)
    resident = occupancy(
        target,
        registers=usage.registers,
        threads=block.threads,
        shared_bytes=usage.shared_bytes + block.shared_bytes,
    )
    launch = (block.threads, block.shared_bytes)
    return ResourceRow(
        build.name, target, function, *usages, *launch, resident.blocks, resident.warps
    )
