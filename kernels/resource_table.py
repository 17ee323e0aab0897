"""The resources of every build for every target, as a table that is kept in the repository."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kernels.registry import labels, resolve
from kernels.runtime.machine_code import Resources, resources
from kernels.runtime.nvrtc import Build, compile_build

# What the fleet has: A100; RTX 3090 Ti and A6000; Ada; H200.
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")


@dataclass(frozen=True, slots=True, order=True)
class ResourceRow:
    """Resources of one function of one build for one target (see Resources for the units)."""

    build: str
    target: str
    function: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def all_builds() -> tuple[Build, ...]:
    """Every way that any registered CUDA kernel is compiled, each once."""
    kernels = [resolve(label, "cuda") for label in labels("cuda")]
    return tuple(sorted({build for k in kernels for build in k.builds()}, key=lambda b: b.name))


def measure_resources(
    builds: Iterable[Build], targets: Sequence[str] = TARGETS
) -> list[ResourceRow]:
    """Compile builds for targets and read their resources, in order. Needs no GPU."""
    work = [(b, target) for b in builds for target in targets if b.runs_on(target)]
    with ThreadPoolExecutor() as pool:  # NVRTC and the tools run outside Python
        parts = pool.map(lambda item: _rows(*item), work)
        return sorted(row for part in parts for row in part)


def write_table(path: Path, rows: Iterable[ResourceRow]) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, [f.name for f in fields(ResourceRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_table(path: Path) -> list[ResourceRow]:
    """Read what write_table wrote."""
    with path.open(newline="") as handle:
        return [
            ResourceRow(
                row["build"],
                row["target"],
                row["function"],
                *(int(row[name]) for name in Resources.__slots__),
            )
            for row in csv.DictReader(handle)
        ]


def _rows(build: Build, target: str) -> list[ResourceRow]:
    found = resources(compile_build(build, target))
    return [
        ResourceRow(
            build.name,
            target,
            function,
            usage.registers,
            usage.stack_bytes,
            usage.local_bytes,
            usage.shared_bytes,
        )
        for function, usage in found.items()
    ]
