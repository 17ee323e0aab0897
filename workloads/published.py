"""Numbers that papers state (published.toml): never mixed with what was measured here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, Literal, cast, get_args

from workloads.errors import WorkloadError

Metric = Literal[
    "speedup",  # time of the baseline's GEMM / the kernel's, at m tokens
    "decode-speedup",  # time of a whole model's decode under the baseline / under the scheme
    "memory-ratio",  # its memory under the baseline / under the scheme
    "throughput-ratio",  # tokens a second while serving, the scheme / the baseline
    "perplexity",
    "perplexity-increase",  # the scheme's - the baseline's
]
Bound = Literal["", "up to", "at most"]


@dataclass(frozen=True, slots=True)
class PublishedValue:
    """One number of a paper.

    table: table, figure or part of it. kernel: a label, or a scheme of a whole model. baseline:
    what a ratio is over, named alike. suite: ours with the layers it is about. model, m: empty and
    None: over all of them. bound: the best or the worst case; empty: a mean or a single value.
    note: how it differs from what is measured here.
    """

    source: str
    table: str
    kernel: str
    metric: Metric
    value: float
    baseline: str = ""
    suite: str = ""
    model: str = ""
    m: int | None = None
    task: str = ""
    bound: Bound = ""
    hardware: str = ""
    note: str = ""

    @property
    def unit(self) -> str:
        """× for ratios; perplexities have none."""
        return "" if self.metric.startswith("perplexity") else "×"


@dataclass(frozen=True, slots=True)
class AbsentTable:
    """A table that we would set beside ours, whose numbers we could not find. why: in words."""

    source: str
    table: str
    about: str
    why: str


@cache
def published_values() -> tuple[PublishedValue, ...]:
    """What papers state, in the order of the file. Raises WorkloadError if it is damaged."""
    found = [value for values in _read("set") for value in _values(values)]
    return tuple(found)


@cache
def absent_tables() -> tuple[AbsentTable, ...]:
    """The tables whose numbers are not in the file. Raises WorkloadError if it is damaged."""
    try:
        return tuple(AbsentTable(**values) for values in _read("absent"))
    except TypeError as error:
        raise WorkloadError(f"published.toml: an absent table is wrong: {error}") from error


def published_speedups(suite: str) -> tuple[PublishedValue, ...]:
    """What papers state of kernels on a suite's layers at one number of tokens."""
    return tuple(
        value
        for value in published_values()
        if (value.suite, value.metric) == (suite, "speedup") and value.m is not None
    )


def _read(section: str) -> list[dict[str, Any]]:
    text = (resources.files("workloads") / "published.toml").read_text(encoding="utf-8")
    return cast("list[dict[str, Any]]", tomllib.loads(text).get(section, []))


def _values(shared: dict[str, Any]) -> Iterator[PublishedValue]:
    """The values of a set: `values` has what is different in each, under the names in `by`."""
    names = ["value"] if "by" not in shared else [*shared["by"], "value"]
    same = {name: value for name, value in shared.items() if name not in ("by", "values")}
    unknown = {*same, *names} - {field.name for field in fields(PublishedValue)}
    if unknown:
        raise WorkloadError(f"published.toml: a set has {', '.join(sorted(unknown))}: no such key")
    try:
        for row in shared["values"]:
            found = PublishedValue(**same, **dict(zip(names, row, strict=True)))
            if found.metric not in get_args(Metric) or found.bound not in get_args(Bound):
                raise ValueError(f"metric {found.metric} or bound {found.bound!r}")
            yield found
    except (KeyError, TypeError, ValueError) as error:
        raise WorkloadError(f"published.toml: a set lacks or has a wrong {error}") from error
