"""Registry of export formats; a format is a module with a function `write(records)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flexq_bench.db.exchange import replacing
from flexq_bench.db.records import Record
from flexq_bench.exchange.exports import (
    bencher,
    openmetrics,
    perfherder,
    pytorch_hud,
    spreadsheets,
)

Export = Callable[[Iterable[Record]], tuple[str | bytes, int]]
EXPORTS: Mapping[str, Export] = {
    "pytorch-hud": pytorch_hud.write,
    "bencher": bencher.write,
    "perfherder": perfherder.write,
    "openmetrics": openmetrics.write,
    "csv": spreadsheets.write_csv,
    "xlsx": spreadsheets.write_xlsx,
}


def write_export(format_name: str, path: str | Path, records: Iterable[Record]) -> int:
    """Write records to a file atomically; returns the number of results in it.

    Raises ResultsFileError if the file can't be written, KeyError for an unknown format.
    """
    text, count = EXPORTS[format_name](records)
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)
    return count
