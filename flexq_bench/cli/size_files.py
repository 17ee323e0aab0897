"""Sizes of an option of the command line: ranges, or a file with such."""

from __future__ import annotations

from flexq_bench.runs.sweep_text import split_sizes
from flexq_bench.runs.text_files import read_text
from workloads.ranges import parse_lines

_MOST_BYTES = 1 << 20  # ten thousand sizes, the most that are taken, are less than a tenth of it


def sizes_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """The sizes of a range, or of `@FILE`, separated by commas or white space. None: not given.

    Raises UsageError if the file can't be read, WorkloadError for what is no range.
    """
    if text is None or not text.startswith("@"):
        return split_sizes(text)
    content = read_text(text[1:], "a file of sizes", most_bytes=_MOST_BYTES)
    return parse_lines(content.splitlines(), f"{option} {text}")
