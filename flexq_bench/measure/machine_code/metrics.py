"""Static metrics of a function's machine code, and those that differ between two revisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flexq_bench.kernels.runtime.resource_row import ResourceRow

Direction = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A named number of one function on one target."""

    name: str
    unit: str
    direction: Direction


REGISTERS = Metric("registers", "registers", "lower")  # of a thread
SPILL_BYTES = Metric("spill_bytes", "bytes", "lower")  # of a thread's stack: spilled registers too
LOCAL_BYTES = Metric("local_bytes", "bytes", "lower")  # of a thread's local memory
SHARED_BYTES = Metric("shared_bytes", "bytes", "lower")  # of a block, static and dynamic
WARPS_PER_SM = Metric("warps_per_sm", "warps", "higher")  # occupancy; 0: a block doesn't fit
RESOURCES = (REGISTERS, SPILL_BYTES, LOCAL_BYTES, SHARED_BYTES, WARPS_PER_SM)

# SASS instructions by the unit that they occupy; names as in NVIDIA's CUDA Binary Utilities.
KINDS = {
    "tensor": ("BMMA", "IMMA", "HMMA", "QMMA", "DMMA", "BGMMA", "IGMMA", "HGMMA", "QGMMA"),
    "convert": ("I2F", "I2FP", "F2I", "F2F", "F2FP", "I2I", "I2IP", "FRND"),
    "float": ("FFMA", "FMUL", "FADD", "FMNMX", "HFMA2", "HMUL2", "HADD2", "HMNMX2"),
    "integer": (
        *("IADD3", "IADD", "IMAD", "LOP3", "SHF", "SHL", "SHR", "LEA", "PRMT", "POPC", "FLO"),
        *("IABS", "IMNMX", "VIMNMX", "SGXT", "BMSK", "BREV", "IDP", "VIADD", "ISETP"),
        *("UIADD3", "UIMAD", "ULOP3", "USHF", "ULEA", "UPRMT", "UPOPC", "UFLO", "UISETP"),
    ),
    "global_load": ("LDG",),
    "global_store": ("STG",),
    "shared_load": ("LDS", "LDSM"),
    "shared_store": ("STS", "STSM"),
    "local": ("LDL", "STL"),
    "async_copy": ("LDGSTS", "UBLKCP", "UTMALDG"),
    "barrier": ("BAR", "SYNCS", "UCGABAR_ARV", "UCGABAR_WAIT"),
}
INSTRUCTIONS = tuple(Metric(f"sass_{kind}", "instructions", "lower") for kind in (*KINDS, "all"))
_PADDING = "NOP"  # fills the code up to a whole cache line and is never executed


def resource_values(row: ResourceRow) -> dict[Metric, float]:
    """The known RESOURCES of a function: without its block, no occupancy."""
    values: dict[Metric, float] = {
        REGISTERS: row.registers,
        SPILL_BYTES: row.stack_bytes,
        LOCAL_BYTES: row.local_bytes,
    }
    if row.dynamic_bytes is not None and row.warps_per_sm is not None:
        values[SHARED_BYTES] = row.shared_bytes + row.dynamic_bytes
        values[WARPS_PER_SM] = row.warps_per_sm
    return values


def instruction_values(counts: Mapping[str, int]) -> dict[Metric, float]:
    """INSTRUCTIONS of a function from the number of each instruction in its SASS."""
    totals: Counter[str] = Counter()
    for kind, names in KINDS.items():
        totals[kind] = sum(counts.get(name, 0) for name in names)
    totals["all"] = sum(count for name, count in counts.items() if name != _PADDING)
    kinds = (*KINDS, "all")
    return {metric: totals[kind] for kind, metric in zip(kinds, INSTRUCTIONS, strict=True)}


Values = Mapping[Metric, float]


@dataclass(frozen=True, slots=True)
class Function:
    """One function of one build on one target."""

    build: str
    target: str
    name: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric that differs. base None: the base has no such function."""

    function: Function
    metric: Metric
    base: float | None
    head: float


def changed_metrics(base: Values | None, head: Values, function: Function) -> list[Difference]:
    """The metrics of a function that differ. base None: it is new, so only a spill counts."""
    if base is None:
        spills = ((metric, head.get(metric)) for metric in (SPILL_BYTES, LOCAL_BYTES))
        return [Difference(function, metric, None, value) for metric, value in spills if value]
    return [
        Difference(function, metric, base[metric], value)
        for metric, value in head.items()
        if metric in base and value != base[metric]
    ]
