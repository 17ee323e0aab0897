"""Jobs that compare two commits: what they ask for, and what came of them, as plain values.

Both are stored with the job, so that any coordinator can carry it out, and so that nothing is lost
if the night that planned it is interrupted before it is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flexq_bench.db.fleet import ComparisonOutcome, JobInfo
from flexq_bench.db.records import DeviceInfo
from flexq_bench.errors import DeviceError, FlexqError, one_line
from flexq_bench.fleet.retry_policy import REVISION_REFUSALS
from flexq_bench.kernels.errors import KernelError
from flexq_bench.measure.ab.rules import InterleaveRules
from flexq_bench.verdicts import CaseComparison, Evidence, confirm
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError

# Cases of a job share pairs of worker processes; an interrupted job loses them.
MAX_CASES = 16
_MEASURED = ("comparison", "detail", "base_binary", "head_binary", "base_config", "head_config")


@dataclass(frozen=True, slots=True)
class CompareJob:
    """Cases of two commits to compare on one device.

    base, head: full commit ids, or labels of kernels if `kernels` says so. project: of both
    commits; empty: this repository. judged: head is not trusted (see compare_judged).
    """

    base: str
    head: str
    cases: tuple[Case, ...]
    project: str = ""
    judged: bool = False
    kernels: bool = False

    @property
    def name(self) -> str:
        """The kernels, or the commits, abbreviated."""
        if self.kernels:
            return f"{self.base}..{self.head}"
        return f"{self.base[:10]}..{self.head[:10]}"

    @property
    def gpus(self) -> int:
        """Number of GPUs that its cases need."""
        return max((case.gpus for case in self.cases), default=1)

    def as_data(self) -> dict[str, Any]:
        """JSON values; `from_data` restores the job."""
        cases = [{"key": c.key, "model": c.model, "layer": c.layer} for c in self.cases]
        names = ("project", "base", "head", "judged", "kernels")
        others = {name: getattr(self, name) for name in names}
        return {**others, "cases": cases}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CompareJob:
        cases = tuple(
            replace(Case.from_key(case["key"]), model=case["model"], layer=case["layer"])
            for case in data["cases"]
        )
        how = data["project"], data["judged"], data.get("kernels", False)
        return cls(data["base"], data["head"], cases, *how)


@dataclass(frozen=True, slots=True)
class ComparisonWork:
    """The stored jobs of a run that compare, for one kind of device.

    repository: that has the commits. rules: of the comparisons; None: the default.
    """

    run: str  # uuid
    gpu: str  # SKU
    repository: Path
    rules: InterleaveRules | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """The answer of a worker: comparisons of a job's cases, or the error that prevented them."""

    comparisons: tuple[CaseComparison, ...] = ()
    error: Exception | None = None

    @classmethod
    def by(cls, compare: Callable[[], Iterable[CaseComparison]]) -> Compared:
        """Call a function that compares, and keep an error that a comparison can have."""
        try:
            return cls(tuple(compare()))
        except (FlexqError, WorkloadError, KernelError) as error:
            return cls(error=error)

    def outcome(self, device: DeviceInfo) -> ComparisonOutcome | None:
        """The end of the job on this device; None: another device may succeed."""
        if self.error is None:
            return ComparisonOutcome("done", outcome=outcome_data(self.comparisons, device))
        if isinstance(self.error, REVISION_REFUSALS) and not isinstance(self.error, DeviceError):
            return ComparisonOutcome("refused", one_line(self.error))
        return None


@dataclass(frozen=True, slots=True)
class StoredComparisons:
    """Stored comparisons and the device that each was measured on."""

    comparisons: list[CaseComparison] = field(default_factory=list)
    devices: list[DeviceInfo] = field(default_factory=list)


def job_infos(jobs: Sequence[CompareJob], devices: int, *, first: int = 1) -> Iterator[JobInfo]:
    """Yield jobs to store: those given, divided so that all devices of a kind have some.

    Cases of a part need the same number of GPUs.
    first: number of the first part of each; a run has one job of each number and pair of commits.
    """
    cases, devices = sum(len(job.cases) for job in jobs), max(devices, 1)
    rounds = math.ceil(cases / (MAX_CASES * devices))  # on each device, of parts of one size
    size = max(1, math.ceil(cases / (max(rounds, 1) * devices)))
    for job in jobs:
        by_gpus: dict[int, list[Case]] = {}
        for case in job.cases:
            by_gpus.setdefault(case.gpus, []).append(case)
        parts = (
            tuple(alike[start : start + size])
            for alike in by_gpus.values()
            for start in range(0, len(alike), size)
        )
        for number, part in enumerate(parts, first):
            content = replace(job, cases=part).as_data()
            yield JobInfo(f"{job.base}..{job.head}", number, content=content)


def outcome_data(comparisons: Sequence[CaseComparison], device: DeviceInfo) -> dict[str, Any]:
    """JSON values of the comparisons of one job; `stored_comparisons` restores them."""
    rows = []
    for compared in comparisons:
        evidence = Evidence(
            compared.case.key, **{name: getattr(compared, name) for name in _MEASURED}
        ).as_dict()
        row = {"case": compared.case.key, "pairs_needed": compared.pairs_needed}
        rows.append(row | {name: evidence[name] for name in _MEASURED})
    return {"device": asdict(device), "comparisons": rows}


def stored_comparisons(
    jobs: Mapping[int, CompareJob], outcomes: Mapping[int, Any]
) -> StoredComparisons:
    """Restore the comparisons of these jobs, in the order of the outcomes."""
    stored = StoredComparisons()
    for number, outcome in outcomes.items():
        job, device = jobs[number], DeviceInfo(**outcome["device"])
        cases = {case.key: case for case in job.cases}
        for row in outcome["comparisons"]:
            evidence = Evidence.from_dict(row)
            measured = {name: getattr(evidence, name) for name in _MEASURED}
            stored.comparisons.append(
                CaseComparison(
                    cases[row["case"]],
                    job.base,
                    job.head,
                    confirmation=confirm(evidence.comparison),
                    pairs_needed=row.get("pairs_needed"),
                    **measured,
                )
            )
            stored.devices.append(device)
    return stored
