"""Resources of one function of a build on a target, and the resulting blocks per SM."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.runtime.machine_code import Resources
from kernels.runtime.nvrtc import Build
from kernels.runtime.occupancy import occupancy


@dataclass(frozen=True, slots=True, order=True)
class ResourceRow:
    """Resources of one function of one build for one target (see Resources for the units).

    threads, dynamic_bytes: of a block (see Block), and with them the blocks and warps that an SM
    holds at once; 0: not even one block fits, so `candidates` leaves it out there. None: the build
    doesn't tell of this function.
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
        """True if a block can be launched on the target, as far as is known."""
        return self.blocks_per_sm != 0


def resource_row(build: Build, target: str, function: str, usage: Resources) -> ResourceRow:
    """Return the resources and occupancy of one function of a build.

    Raises UnsupportedError for an unknown target.
    """
    needs = (usage.registers, usage.stack_bytes, usage.local_bytes, usage.shared_bytes)
    block = build.block
    if block is None or block.function != function:
        return ResourceRow(build.name, target, function, *needs, None, None, None, None)
    held = occupancy(
        target,
        registers=usage.registers,
        threads=block.threads,
        shared_bytes=usage.shared_bytes + block.shared_bytes,
    )
    of_block = (block.threads, block.shared_bytes)
    return ResourceRow(build.name, target, function, *needs, *of_block, held.blocks, held.warps)
