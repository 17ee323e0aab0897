"""Parser of lists and ranges of sizes: `1,2,4:64:x2`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.operation import MAX_DIMENSION

MAX_VALUES = 10_000
_SIZES = range(1, MAX_DIMENSION + 1)
PARAMETERS = range((1 << 40) + 1)  # of operations, which each have bounds of their own

_NUMBER = r"[0-9]{1,18}"
_FROM = re.compile(rf"{_NUMBER}:")
_ITEM = re.compile(rf"(?P<low>{_NUMBER})(:(?P<high>{_NUMBER})(:(?P<by>x?)(?P<step>{_NUMBER}))?)?")


def parse_ranges(text: str, within: range = _SIZES) -> tuple[int, ...]:
    """Return the sorted unique values of a comma-separated list of sizes.

    An item is a value `8`, a range `1:8` (inclusive), a range with a step `8:64:8`, or a geometric
    range `4:64:x2`: 4, 8, 16, 32, 64. within: which values may be. Raises WorkloadError if an item
    has another form, is descending or out of range, or if there are more than 10,000 values; they
    are counted before they are generated.
    """
    items = text.count(",") + 1
    if items > MAX_VALUES:
        raise _too_many_values(_quoted(text), items)
    parts = [_parse_item(item.strip(), text, within) for item in text.split(",")]
    return _merge(parts, _quoted(text))


def parse_lines(lines: Iterable[str], file: str) -> tuple[int, ...]:
    """Return the sorted unique values of a file's lines: items with commas or spaces between.

    Raises WorkloadError like `parse_ranges`, with the line number but not its content: readers of
    the message may not be allowed to read the file.
    """
    parts: list[Sequence[int]] = []
    for number, line in enumerate(lines, start=1):
        try:
            parts += [_parse_item(item, "") for item in line.replace(",", " ").split()]
        except WorkloadError:
            raise WorkloadError(
                f"{file}: line {number} contains something other than sizes and ranges from 1 to "
                f"{MAX_DIMENSION:,}: write 8, 1:8, 8:64:8 or 4:64:x2"
            ) from None
        if len(parts) > MAX_VALUES:
            raise _too_many_values(file, len(parts))
    if not parts:
        raise WorkloadError(f"{file} holds no size: write 8, 1:8, 8:64:8 or 4:64:x2")
    return _merge(parts, file)


def check_sizes(text: str) -> str:
    """Return the text. Raises WorkloadError unless `in_sizes` can read it."""
    _sizes(text)
    return text


def in_sizes(size: int, text: str) -> bool:
    """Return True if a list as of `parse_ranges` has the size; an item `64:` has no upper end.

    Nothing is listed, so a range may have any number of values.
    """
    return any(size in part for part in _sizes(text))


@lru_cache
def _sizes(text: str) -> tuple[Sequence[int], ...]:
    items = (item.strip() for item in text.split(","))
    closed = (f"{item}{PARAMETERS[-1]}" if _FROM.fullmatch(item) else item for item in items)
    return tuple(_parse_item(item, text, PARAMETERS) for item in closed)


def _merge(parts: Sequence[Sequence[int]], source: str) -> tuple[int, ...]:
    count = sum(len(part) for part in parts)
    if count > MAX_VALUES:
        raise _too_many_values(source, count)
    return tuple(sorted({value for part in parts for value in part}))


def _too_many_values(source: str, count: int) -> WorkloadError:
    return WorkloadError(
        f"{source} has {count:,} values, at most {MAX_VALUES:,} are taken: use a larger step or "
        "split it"
    )


def _parse_item(item: str, text: str, within: range = _SIZES) -> range | tuple[int, ...]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise WorkloadError(
            f"{_quoted(item)} in {_quoted(text)} is not a size or a range: write 8, 1:8, 8:64:8 "
            "or 4:64:x2"
        )
    low, high = int(match["low"]), int(match["high"] or match["low"])
    step, multiplies = int(match["step"] or 1), match["by"] == "x"
    if low < within[0] or high > within[-1]:
        raise WorkloadError(
            f"{item!r} is out of range: sizes are from {within[0]} to {within[-1]:,}"
        )
    if high < low:
        raise WorkloadError(f"{item!r} runs backwards: write the smaller end first")
    if step < (2 if multiplies else 1):
        smallest = "x2" if multiplies else "1"
        raise WorkloadError(f"{item!r} never reaches its end: the step must be at least {smallest}")
    return _powers(low, high, step) if multiplies else range(low, high + 1, step)


def _powers(low: int, high: int, factor: int) -> tuple[int, ...]:
    values = [low]
    while low and values[-1] * factor <= high:
        values.append(values[-1] * factor)
    return tuple(values)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
