"""The resources of builds for targets, as a table that is kept in the repository.

Every build is in it for the targets that kernels run on. For those that are only compiled it has
the largest build of each source: compiling all of them takes as long as for two of the others.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kernels.cuda.block_order import BUILD as ORDER_BUILD
from kernels.cuda.clock_stamps import BUILD as CLOCK_BUILD
from kernels.decoder.cuda_operations import builds as decoder_builds
from kernels.registry import labels, resolve
from kernels.runtime.machine_code import resources
from kernels.runtime.nvrtc import Build, compile_build
from kernels.runtime.occupancy import COMPILED_ONLY, RUN_TARGETS
from kernels.runtime.resource_row import ResourceRow, resource_row

_TEXT_COLUMNS = ("build", "target", "function")


def all_builds() -> tuple[Build, ...]:
    """Every way that any CUDA kernel is compiled, each once.

    Those between a decoder's layers and the one that reads clocks are among them.
    """
    kernels = [resolve(label, "cuda") for label in labels("cuda")]
    builds = {build for kernel in kernels for build in kernel.builds()}
    return tuple(
        sorted(builds | {CLOCK_BUILD, ORDER_BUILD, *decoder_builds()}, key=lambda build: build.name)
    )


def largest_builds(target: str) -> tuple[Build, ...]:
    """Of each source the build whose block asks for most shared memory, of those for `target`."""
    of_source: dict[str, Build] = {}
    for build in sorted(all_builds(), key=_requested_bytes):
        if build.runs_on(target):
            of_source[build.source] = build
    return tuple(of_source.values())


def measure_table() -> list[ResourceRow]:
    """Compile what the table has and read the resources, in order. Needs no GPU."""
    rows = measure_resources(all_builds(), RUN_TARGETS)
    for target in COMPILED_ONLY:
        rows += measure_resources(largest_builds(target), (target,))
    return sorted(rows)


def measure_resources(builds: Iterable[Build], targets: Sequence[str]) -> list[ResourceRow]:
    """Compile builds for targets and read their resources, in order. Needs no GPU."""
    work = [(b, target) for b in builds for target in targets if b.runs_on(target)]
    with ThreadPoolExecutor() as pool:  # NVRTC and the tools run outside Python
        parts = pool.map(lambda item: resource_rows(*item), work)
        return sorted(row for part in parts for row in part)


def resource_rows(build: Build, target: str) -> list[ResourceRow]:
    """One row a function of a build. Raises CompileError, UnsupportedError."""
    by_function = resources(compile_build(build, target))
    return [resource_row(build, target, function, usage) for function, usage in by_function.items()]


def write_table(path: Path, rows: Iterable[ResourceRow]) -> None:
    """Write rows as CSV; what is not known is an empty cell."""
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, [f.name for f in fields(ResourceRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_table(path: Path) -> list[ResourceRow]:
    """Read what write_table wrote."""
    with path.open(newline="") as handle:
        return [
            ResourceRow(**{name: _value(name, cell) for name, cell in row.items()})
            for row in csv.DictReader(handle)
        ]


def _requested_bytes(build: Build) -> tuple[int, str]:
    return build.block.shared_bytes if build.block else 0, build.name


def _value(column: str, cell: str) -> Any:
    if column in _TEXT_COLUMNS:
        return cell
    return int(cell) if cell else None
