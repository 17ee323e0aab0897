"""Sizes of a command line option: ranges, or a file with ranges."""

from __future__ import annotations

from flexq_bench.runs.text_files import read_text
from flexq_bench.sweeps.text import split_sizes
from flexq_bench.workloads.ranges import parse_lines

_MOST_BYTES = 1 << 20  # ten times the size of a file with the largest number of sizes, 10,000


def sizes_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse ranges, or `@FILE` with ranges separated by commas or white space. None: not given.

    Raises UsageError if the file can't be read, WorkloadError for an invalid range.
    """
    if text is None or not text.startswith("@"):
        return split_sizes(text)
    content = read_text(text[1:], "a file of sizes", most_bytes=_MOST_BYTES)
    return parse_lines(content.splitlines(), f"{option} {text}")
