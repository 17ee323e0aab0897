"""Kernel families, formatted one per line: kernels whose names differ in their bits only."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 100  # columns of a line
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """A family of kernels. name: with folded bit widths. labels: of its kernels, with variants.

    pct_of_floor: the best of the newest results on this machine's device; None: there is none.
    """

    name: str
    labels: tuple[str, ...]
    summary: str
    pct_of_floor: float | None


def kernel_families(
    kernels: Sequence[Mapping[str, Any]], pct_of_floor: Mapping[str, float]
) -> tuple[KernelFamily, ...]:
    """Families of kernel_rows, in the order of their first kernels. pct_of_floor: by label."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in kernels:
        groups.setdefault(_NUMBER.sub("#", row["kernel"].partition("[")[0]), []).append(row)
    return tuple(_family(group, pct_of_floor) for group in groups.values())


def folded(names: Sequence[str]) -> str:
    """Merge names that differ in their numbers only: abq-w{2..8}a{2..8}, w{4,8}a16.

    For names with other differences, the first name is returned.
    """
    if len({_NUMBER.sub("#", name) for name in names}) > 1:
        return names[0]
    values = [sorted(set(column)) for column in zip(*map(_numbers, names), strict=True)]
    parts = _NUMBER.split(names[0])
    return parts[0] + "".join(
        _span(numbers) + part for numbers, part in zip(values, parts[1:], strict=True)
    )


def lines_of(families: Sequence[KernelFamily]) -> Iterator[str]:
    """Yield a heading and one line per family, at most WIDTH columns wide."""
    name_width = max((len(family.name) for family in families), default=0)
    yield f"{'family':{name_width}}  labels  % floor  for"
    for family in families:
        share = "" if family.pct_of_floor is None else f"{family.pct_of_floor:.1f}"
        line = f"{family.name:{name_width}}  {len(family.labels):6}  {share:>7}  "
        yield line + textwrap.shorten(family.summary, WIDTH - len(line), placeholder=" …")


def _family(group: Sequence[Mapping[str, Any]], pct_of_floor: Mapping[str, float]) -> KernelFamily:
    labels = tuple(dict.fromkeys(row["kernel"] for row in group))
    first = [row for row in group if row["backend"] == group[0]["backend"]]
    plain = [row for row in first if "[" not in row["kernel"]] or first
    measured = [pct_of_floor[label] for label in labels if label in pct_of_floor]
    return KernelFamily(
        folded([row["kernel"].partition("[")[0] for row in group]),
        labels,
        folded(list(dict.fromkeys(row["summary"] for row in plain))),
        max(measured, default=None),
    )


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _span(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if len(values) > 2 and values[-1] - values[0] == len(values) - 1:
        return f"{{{values[0]}..{values[-1]}}}"
    return f"{{{','.join(map(str, values))}}}"
