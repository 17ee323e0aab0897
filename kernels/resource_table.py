"""Table of registers, shared memory and occupancy of every build, kept in the repository.

Targets that kernels run on have every build. Targets that are only compiled for have the largest
build of each source, because compiling all builds for them takes as long as for two other targets.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flexq_bench.kernels.cuda.block_order import BUILD as ORDER_BUILD
from flexq_bench.kernels.cuda.clock_stamps import BUILD as CLOCK_BUILD
from flexq_bench.kernels.cuda.grouped.layer import builds as grouped_builds
from flexq_bench.kernels.decoder.cuda_operations import builds as decoder_builds
from flexq_bench.kernels.registry import labels, resolve
from flexq_bench.kernels.runtime.machine_code import resources
from flexq_bench.kernels.runtime.nvrtc import Build, compile_build
from flexq_bench.kernels.runtime.occupancy import RUN_TARGETS, TARGETS
from flexq_bench.kernels.runtime.resource_row import ResourceRow, resource_row

_TEXT_COLUMNS = ("build", "target", "function")


def all_builds() -> tuple[Build, ...]:
    """Return the distinct builds of all CUDA kernels, sorted by name.

    Includes grouped kernels, the non-GEMM operators of a decoder block and the kernels that read
    clocks and set the block order.
    """
    kernels = [resolve(label, "cuda") for label in labels("cuda")]
    builds = {build for kernel in kernels for build in kernel.builds()}
    builds |= {CLOCK_BUILD, ORDER_BUILD, *grouped_builds(), *decoder_builds()}
    return tuple(sorted(builds, key=lambda build: build.name))


def largest_builds(target: str) -> tuple[Build, ...]:
    """Return, for each source, the build for `target` whose blocks use most shared memory."""
    by_source: dict[str, Build] = {}
    for build in sorted(all_builds(), key=_requested_bytes):
        if build.runs_on(target):
            by_source[build.source] = build
    return tuple(by_source.values())


def measure_table(
    sources: Sequence[str] = (), known: Iterable[ResourceRow] = ()
) -> list[ResourceRow]:
    """Compile builds of the table and read their resources, in order. Needs no GPU.

    sources: whose builds are compiled; rows of others are taken from `known`. Empty: all.
    """
    builds = {(build, target) for build in all_builds() for target in RUN_TARGETS}
    builds |= {(b, t) for t in TARGETS if t not in RUN_TARGETS for b in largest_builds(t)}
    work = [(b, t) for b, t in builds if b.runs_on(t)]
    kept = {(b.name, t) for b, t in work if sources and b.source not in sources}
    rows = [row for row in known if (row.build, row.target) in kept]
    return sorted([*rows, *measure_resources((b, t) for b, t in work if (b.name, t) not in kept)])


def measure_resources(work: Iterable[tuple[Build, str]]) -> list[ResourceRow]:
    """Compile builds for their targets and read their resources, in order. Needs no GPU."""
    with ThreadPoolExecutor() as pool:  # NVRTC and the tools run outside Python
        parts = pool.map(lambda item: resource_rows(*item), work)
        return sorted(row for part in parts for row in part)


def resource_rows(build: Build, target: str) -> list[ResourceRow]:
    """Return one row per function of a build. Raises CompileError, UnsupportedError."""
    by_function = resources(compile_build(build, target))
    return [resource_row(build, target, function, usage) for function, usage in by_function.items()]


def read_table(path: Path) -> list[ResourceRow]:
    """Read the rows that write_table wrote."""
    with path.open(newline="") as handle:
        rows = csv.reader(handle)
        columns = next(rows)
        return [ResourceRow(*map(_value, columns, row)) for row in rows]


def _value(column: str, cell: str) -> Any:
    return cell if column in _TEXT_COLUMNS else int(cell) if cell else None


def write_table(path: Path, rows: Iterable[ResourceRow]) -> None:
    """Write rows as CSV; unknown values are empty cells."""
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, [f.name for f in fields(ResourceRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _requested_bytes(build: Build) -> tuple[int, str]:
    return build.block.shared_bytes if build.block else 0, build.name
