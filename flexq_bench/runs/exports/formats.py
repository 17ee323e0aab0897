"""Formats to export to: a format is a module with `write(records)`, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from db.exchange import replacing
from db.records import Record
from flexq_bench.runs.exports import bencher, openmetrics, perfherder, pytorch_hud

Export = Callable[[Iterable[Record]], tuple[str, int]]
EXPORTS: Mapping[str, Export] = {
    "pytorch-hud": pytorch_hud.write,
    "bencher": bencher.write,
    "perfherder": perfherder.write,
    "openmetrics": openmetrics.write,
}


def write_export(format_name: str, path: str | Path, records: Iterable[Record]) -> int:
    """Write records in a format; how many results the file has. It appears when it is whole.

    Raises ResultsFileError if the file can't be written; KeyError: there is no such format.
    """
    text, count = EXPORTS[format_name](records)
    with replacing(path) as file:
        file.write(text.encode())
    return count
