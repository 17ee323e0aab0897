"""Numbers published in papers (published.toml), kept apart from measurements."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from flexq_bench.workloads.data_files import (
    AnyText,
    Count,
    DataTable,
    Text,
    Texts,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError

Metric = Literal[
    "speedup",  # time of the baseline's GEMM / the kernel's, at m tokens
    "decode-speedup",  # time of a whole model's decode under the baseline / under the scheme
    "memory-ratio",  # memory of a whole model under the baseline / under the scheme
    "throughput-ratio",  # tokens/s while serving, the scheme / the baseline
    "perplexity",
    "perplexity-increase",  # the scheme's - the baseline's
]
Bound = Literal["", "up to", "at most"]


class PublishedValue(DataTable):
    """One number of a paper.

    table: table, figure or part of it. kernel: a label, or a scheme of a whole model. baseline:
    denominator of a ratio, named like kernel. suite: the suite with these layers. model, m: empty
    or None: all. bound: best or worst case; empty: a mean or a single value. note: differences from
    the measurements here.
    """

    source: Text
    table: Text
    kernel: Text
    metric: Metric
    value: Annotated[float, Field(strict=True, allow_inf_nan=False)]
    baseline: AnyText = ""
    suite: AnyText = ""
    model: AnyText = ""
    m: Count | None = None
    task: AnyText = ""
    bound: Bound = ""
    hardware: AnyText = ""
    note: AnyText = ""

    @property
    def unit(self) -> str:
        """Unit: × for ratios; empty for perplexities."""
        return "" if self.metric.startswith("perplexity") else "×"


class AbsentTable(DataTable):
    """A published table whose numbers are not available. why: the reason in words."""

    source: Text
    table: Text
    about: Text
    why: Text


class _SetTable(DataTable):
    """Values of a paper: other keys are fields of PublishedValue common to all of them.

    by: names of the fields that differ. values: rows of these fields and the number.
    """

    model_config = ConfigDict(extra="allow")
    by: Texts = ()
    values: tuple[tuple[Any, ...], ...]


class _PublishedTable(DataTable):
    set: tuple[_SetTable, ...] = ()
    absent: tuple[AbsentTable, ...] = ()


@cache
def published_values() -> tuple[PublishedValue, ...]:
    """Return the published numbers, in the order of the file.

    Raises WorkloadError if the file is damaged.
    """
    sets = enumerate(_read().set, start=1)
    return tuple(value for position, table in sets for value in _values(table, position))


@cache
def absent_tables() -> tuple[AbsentTable, ...]:
    """Return the tables without numbers in the file. Raises WorkloadError if it is damaged."""
    return _read().absent


def published_speedups(suite: str) -> tuple[PublishedValue, ...]:
    """Return the published speedups of kernels on a suite's layers at one number of tokens."""
    return tuple(
        value
        for value in published_values()
        if (value.suite, value.metric) == (suite, "speedup") and value.m is not None
    )


def _read() -> _PublishedTable:
    file = resources.files("flexq_bench") / "workloads" / "published.toml"
    return validated(_PublishedTable, read_toml(file), file.name)


def _values(table: _SetTable, position: int) -> Iterator[PublishedValue]:
    where = f"published.toml, set {position}"
    names = (*table.by, "value")
    for row in table.values:
        if len(row) != len(names):
            raise WorkloadError(f"{where}: a row must have {', '.join(names)}, got {row!r}")
        fields = dict(zip(names, row, strict=True))
        yield validated(PublishedValue, (table.model_extra or {}) | fields, where)
