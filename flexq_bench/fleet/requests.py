"""Requests for measurements on the fleet, validated when queued and again when served.

A request is data: names from the registry, the suites and the catalog, and bounded integers.
Nothing in it is executed, imported or opened.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from flexq_bench.db.engine import Session
from flexq_bench.db.queries import capability_of
from flexq_bench.db.requests import REQUEST_KINDS, Limits, RequestInfo, add_request
from flexq_bench.errors import UsageError
from flexq_bench.kernels.contract import Backend, Capability
from flexq_bench.runs.cost_estimate import read_costs
from flexq_bench.runs.plan import Plan, build_plan, offered_labels
from flexq_bench.sweeps.sweep import Sweep, check_cases, check_fields, sweep_of
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.suite import Suite
from flexq_bench.workloads.suites import list_suites, load_suite

MAX_CASES = 2000  # per request, floors included
# Of queued and running requests. A requester can type any name, so there is also a limit for all.
LIMITS = Limits(
    requests=4, cases=4000, cases_of_one=MAX_CASES, requests_of_all=100, cases_of_all=40_000
)
_MAX_NAME_CHARS = 80
BISECT = "bisect"
MAX_COMPARISONS = 20  # per bisection; 1000 commits need eleven if every comparison is conclusive
_MAX_KEY_CHARS = 400
_FULL_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
# Assumed for an unknown GPU, on which all kernels run, so that the cases of all are counted.
_MOST_CAPABLE: Capability = (9, 0)


@dataclass(frozen=True, slots=True)
class Bisection:
    """A search for the commit after `good` up to `bad` that changed a case. Both are full shas."""

    case: Case
    good: str
    bad: str

    def as_data(self) -> dict[str, Any]:
        return {"case": self.case.key, "good": self.good, "bad": self.bad}


def bisection_of(data: Mapping[str, Any]) -> Bisection:
    """Parse a bisection from plain data. Raises UsageError or WorkloadError if it is invalid."""
    check_fields(data, ("case", "good", "bad"), "a bisection")
    ends = [str(data.get(name, "")) for name in ("good", "bad")]
    for name in ends:
        if not _FULL_SHA.fullmatch(name):
            raise UsageError(f"{name!r:.60} is not the full id of a commit")
    if ends[0] == ends[1]:
        raise UsageError("good and bad are the same commit: there is nothing to search")
    return Bisection(Case.from_key(str(data.get("case", ""))[:_MAX_KEY_CHARS]), *ends)


def bisect_request(
    session: Session,
    bisection: Bisection,
    *,
    requester: str,
    gpu: str,
    backend: Backend = "cuda",
) -> RequestInfo:
    """A request for a bisection, checked but not queued. Raises as `checked_request`."""
    return checked_request(
        session, BISECT, bisection.as_data(), requester=requester, gpu=gpu, backend=backend
    )


def sweep_request(
    session: Session, sweep: Sweep, *, requester: str, gpu: str = "", backend: Backend = "cuda"
) -> RequestInfo:
    """A request for a sweep, checked and estimated but not queued. Raises as `checked_request`."""
    return checked_request(
        session, "sweep", sweep.as_data(), requester=requester, gpu=gpu, backend=backend
    )


def checked_request(
    session: Session,
    kind: str,
    content: Mapping[str, Any],
    *,
    requester: str,
    gpu: str = "",
    backend: Backend = "cuda",
) -> RequestInfo:
    """Validate and build a request; `submit` queues it.

    kind: "sweep" (content: Sweep.as_data), "suite" ({"suite": NAME}) or "bisect" (content:
    Bisection.as_data). gpu: a SKU; empty: any. backend: of the requested GPU, which determines the
    kernels.
    Raises UsageError or WorkloadError if the content is invalid or too large.
    """
    name = requester.strip()
    if not name or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise UsageError(
            f"a requester has a name of 1 to {_MAX_NAME_CHARS} letters, got {name!r:.60}"
        )
    if len(gpu) > _MAX_NAME_CHARS or not (gpu == "" or gpu.isprintable()):
        raise UsageError(f"{gpu!r:.60} is no name of a GPU: see `flexq-bench list devices`")
    expected_s = None
    if kind == BISECT:
        bisection_of(content)
        cases = MAX_COMPARISONS
    else:
        plan = request_plan(kind, content, backend, _capability(session, gpu, backend))
        cases = len(plan.cases)
        expected_s = read_costs(session, gpu or None).total(plan.cases)
    return RequestInfo(
        uuid=str(uuid.uuid4()),
        kind=kind,
        content=dict(content),
        requester=name,
        gpu=gpu,
        cases=cases,
        expected_s=expected_s,
        created_at=datetime.now(UTC),
    )


def submit(session: Session, request: RequestInfo) -> None:
    """Queue a request. Raises LimitError if it is too large, or if too many are queued already."""
    add_request(session, request, limits=LIMITS)


def request_plan(
    kind: str, content: Mapping[str, Any], backend: Backend, capability: Capability | None
) -> Plan:
    """The plan of a request on a device. Raises UsageError or WorkloadError.

    Called when a request is queued and when it is served: both refuse more cases than a request
    may have. Cases are counted before they are built.
    """
    suite, kernels = _suite(kind, content)
    offered = offered_labels(suite, backend, capability, requested_kernels=kernels)
    check_cases(suite.count(offered), MAX_CASES, "a request")
    plan = build_plan(suite, backend, capability, requested_kernels=kernels)
    check_cases(len(plan.cases), MAX_CASES, "a request")  # with the probes
    return plan


def _suite(kind: str, content: Mapping[str, Any]) -> tuple[Suite, tuple[str, ...]]:
    """The requested suite, and the kernels that must exist."""
    if kind == "sweep":
        sweep = sweep_of(content)
        return sweep.suite(), sweep.kernels
    if kind == "suite":
        check_fields(content, ("suite",), "a request for a suite")
        # By name only: with a path, a requester could choose which file the server reads.
        name = str(content.get("suite", ""))
        if name not in list_suites():
            raise UsageError(unknown("suite", name, list_suites()))
        return load_suite(name), ()
    raise UsageError(unknown("kind of request", kind, REQUEST_KINDS))


def _capability(session: Session, gpu: str, backend: Backend) -> Capability | None:
    if backend == "cpu":
        return None
    return capability_of(session, gpu) or _MOST_CAPABLE
