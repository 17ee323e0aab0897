"""`flexq-bench db export --format`: records in the formats of other services."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flexq_bench.cli.external_import import TRACES
from flexq_bench.errors import UsageError

if TYPE_CHECKING:
    from flexq_bench.db.records import Record


OWN_PROJECT = "flexq-bench"  # name of this repository's results, which have no project


def refuse_projects(format_name: str, projects: Sequence[str]) -> None:
    """Raise UsageError if projects were requested and the format can't represent them."""
    other_projects = [name for name in projects if name]
    if format_name == TRACES and other_projects:
        raise UsageError(
            f"{TRACES} traces are of kernels of this repository, whose formats are known: leave "
            f"--project {other_projects[0]} out, or take another format"
        )


def write_external(format_name: str, file: str, records: Iterable[Record]) -> int:
    """Write records in another service's format; returns the result count. Raises UsageError."""
    from flexq_bench.exchange.exports.formats import EXPORTS, write_export
    from flexq_bench.workloads.names import unknown

    if format_name == TRACES:
        from flexq_bench.exchange.flashinfer_traces import write_traces

        return write_traces(file, records)
    if format_name not in EXPORTS:
        raise UsageError(unknown("format", format_name, (*EXPORTS, TRACES)))
    return write_export(format_name, file, records)
