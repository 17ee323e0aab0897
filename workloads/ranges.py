"""Lists and ranges of sizes as people type them: `1,2,4:64:x2`."""

from __future__ import annotations

import re

from workloads.errors import WorkloadError
from workloads.gemm import MAX_DIMENSION

MAX_VALUES = 10_000

_NUMBER = r"[0-9]{1,18}"
_ITEM = re.compile(rf"(?P<low>{_NUMBER})(:(?P<high>{_NUMBER})(:(?P<by>x?)(?P<step>{_NUMBER}))?)?")


def parse_ranges(text: str) -> tuple[int, ...]:
    """Sorted unique values of a comma-separated list of sizes.

    An item is a value `8`, a range `1:8` (both ends belong to it), a range with a step `8:64:8`,
    or a range that multiplies, `4:64:x2`: 4, 8, 16, 32, 64. Values are from 1 to 2^24.

    Raises WorkloadError if an item has another form, runs backwards or past the largest size, or
    if there are more than 10,000 values; none is made before their number is known.
    """
    parts = [_parse_item(item.strip(), text) for item in text.split(",")]
    count = sum(len(part) for part in parts)
    if count > MAX_VALUES:
        raise WorkloadError(
            f"{_quoted(text)} has {count:,} values, at most {MAX_VALUES:,} are taken: "
            "use a larger step or split it"
        )
    return tuple(sorted({value for part in parts for value in part}))


def _parse_item(item: str, text: str) -> range | tuple[int, ...]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise WorkloadError(
            f"{_quoted(item)} in {_quoted(text)} is not a size or a range: write 8, 1:8, 8:64:8 "
            "or 4:64:x2"
        )
    low, high = int(match["low"]), int(match["high"] or match["low"])
    step, multiplies = int(match["step"] or 1), match["by"] == "x"
    if low < 1 or high > MAX_DIMENSION:
        raise WorkloadError(f"{item!r} leaves 1 to {MAX_DIMENSION:,}, where sizes lie")
    if high < low:
        raise WorkloadError(f"{item!r} runs backwards: write the smaller end first")
    if step < (2 if multiplies else 1):
        least = "x2" if multiplies else "1"
        raise WorkloadError(f"{item!r} never reaches its end: the step must be at least {least}")
    return _powers(low, high, step) if multiplies else range(low, high + 1, step)


def _powers(low: int, high: int, factor: int) -> tuple[int, ...]:
    values = [low]
    while values[-1] * factor <= high:
        values.append(values[-1] * factor)
    return tuple(values)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
