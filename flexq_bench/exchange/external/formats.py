"""Registry of import formats; a format is a module with a function `read(path)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external import (
    criterion,
    csv_results,
    google_benchmark,
    nvbench,
    pytest_benchmark,
)
from flexq_bench.exchange.external.result import Reading

FORMATS: Mapping[str, Callable[[str], Reading]] = {
    "nvbench": nvbench.read,
    "google-benchmark": google_benchmark.read,
    "pytest-benchmark": pytest_benchmark.read,
    "criterion": criterion.read,
    "csv": csv_results.read,
}


def read_results(format_name: str, path: str) -> Reading:
    """Read the results of a file.

    Raises UsageError if the file is of another format, KeyError for an unknown format.
    """
    reading = FORMATS[format_name](path)
    reasons = {entry.reason for entry in reading.refused}
    if not reading.results and len(reading.refused) > 1 and len(reasons) == 1:
        raise UsageError(
            f"{path}: none of its {len(reading.refused)} results can be read, {reasons.pop()}: "
            f"is it a file of {format_name}?"
        )
    return reading
