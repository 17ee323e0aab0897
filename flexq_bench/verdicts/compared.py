"""Inputs of verdicts: a case of two commits, compared on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from flexq_bench.db.records import DeviceInfo
from flexq_bench.verdicts.confirmation import Comparison
from flexq_bench.workloads.case import Case


class Compared(Protocol):
    """Fields of flexq_bench.measure.ab.CaseComparison.

    base, head: full shas. base_binary, head_binary: hash of the machine code; None: not built by
    us, or never run. detail: why there is no data, or what is wrong; otherwise empty.
    """

    @property
    def case(self) -> Case: ...
    @property
    def base(self) -> str: ...
    @property
    def head(self) -> str: ...
    @property
    def comparison(self) -> Comparison: ...
    @property
    def base_binary(self) -> str | None: ...
    @property
    def head_binary(self) -> str | None: ...
    @property
    def base_config(self) -> dict[str, Any]: ...
    @property
    def head_config(self) -> dict[str, Any]: ...
    @property
    def detail(self) -> str: ...


Comparer = Callable[[Sequence[Case]], Iterator[Compared]]


class ComparisonDevice(Protocol):
    """The device that both commits ran on: a flexq_bench.runs.machine.Machine."""

    @property
    def device(self) -> DeviceInfo: ...

    def series_of(self, case: Case) -> dict[str, Any]:
        """The identity of the series of the case's times on this device."""
