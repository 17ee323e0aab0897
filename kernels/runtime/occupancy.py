"""Occupancy: resident blocks of a function on an SM, from its resource usage.

Limits are those of NVIDIA's CUDA Programming Guide, "Compute Capabilities", tables of technical
specifications and of shared memory capacities (10.0 and 12.0: of CUDA 13.0). Registers are
allocated to a warp in units of 256, within one of four partitions of an SM. Shared memory is
allocated to a block in units of 128 bytes, and the system reserves 1 KB of each block. These rules
are those of NVIDIA's `cuda_occupancy.h`; a test on a GPU compares the results with the driver's.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexq_bench.kernels.errors import UnsupportedError

RESERVED_SHARED_BYTES = 1024  # per block, from compute capability 8.0 on
WARP = 32
_KB = 1024
_REGISTERS = 65536  # of an SM
_PARTITIONS = 4  # of an SM; a warp's registers are allocated in one of them
_MAX_THREADS = 1024  # of a block
_REGISTER_UNIT = 256  # registers of a warp are a multiple of it
_SHARED_UNIT = 128  # bytes of a block are a multiple of it


@dataclass(frozen=True, slots=True)
class SmLimits:
    """Resource limits of an SM; block_shared_bytes: the most that one block may request."""

    blocks: int
    warps: int
    shared_bytes: int
    block_shared_bytes: int


LIMITS = {
    "sm_80": SmLimits(32, 64, 164 * _KB, 163 * _KB),
    "sm_86": SmLimits(16, 48, 100 * _KB, 99 * _KB),
    "sm_89": SmLimits(24, 48, 100 * _KB, 99 * _KB),
    "sm_90": SmLimits(32, 64, 228 * _KB, 227 * _KB),
    "sm_100": SmLimits(32, 64, 228 * _KB, 227 * _KB),
    "sm_120": SmLimits(24, 48, 100 * _KB, 99 * _KB),
}
# A100; RTX 3090 Ti and A6000; Ada; H100 and H200; B200; RTX PRO 6000 and RTX 50.
TARGETS = tuple(LIMITS)
COMPILED_ONLY = ("sm_100", "sm_120")  # kernels never ran there: only their code is analyzed
RUN_TARGETS = tuple(target for target in TARGETS if target not in COMPILED_ONLY)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Resident blocks and warps of an SM. Zero: not even one block fits."""

    blocks: int
    warps: int


def occupancy(target: str, *, registers: int, threads: int, shared_bytes: int) -> Occupancy:
    """Return the resident blocks and warps of an SM of `target`, for example "sm_86".

    registers: per thread. threads: per block. shared_bytes: per block, static and dynamic, without
    the reserved bytes. Raises UnsupportedError for a target without limits.
    """
    limits = LIMITS.get(target)
    if limits is None:
        raise UnsupportedError(f"no limits of {target} are known: there are {', '.join(LIMITS)}")
    warps = -(-threads // WARP)
    warp_registers = _rounded_up(registers * WARP, _REGISTER_UNIT)
    if threads > _MAX_THREADS or shared_bytes > limits.block_shared_bytes:
        return Occupancy(0, 0)
    block_bytes = _rounded_up(shared_bytes + RESERVED_SHARED_BYTES, _SHARED_UNIT)
    blocks = min(limits.blocks, limits.warps // warps, limits.shared_bytes // block_bytes)
    if warp_registers:
        resident_warps = _REGISTERS // _PARTITIONS // warp_registers * _PARTITIONS
        blocks = min(blocks, resident_warps // warps)
    return Occupancy(blocks, blocks * warps)


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
