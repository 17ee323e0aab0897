"""Requests that an alert's buttons queue for a worker, and their progress."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from flexq_bench.dashboard.database import write_request
from flexq_bench.dashboard.shared.formatting import as_text, local_time, time_zone
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.queries import AlertRow, DecisionRow, RequestRow
from flexq_bench.db.requests import OPEN_REQUEST_STATES
from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.kernels.errors import KernelError
from flexq_bench.results.alert_commands import can_be_repeated, case_of, is_one_step
from flexq_bench.sweeps.sweep import Sweep
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload
from flexq_bench.workloads.suite import Shape

MAX_LISTED = 20
_REQUESTER = "triage"
_REFRESH_INTERVAL = timedelta(seconds=10)


def show_buttons(
    place: DeltaGenerator, database: Database, row: AlertRow, member: DecisionRow | None = None
) -> None:
    """Show buttons that queue a sweep of an alert's cases, or a bisection.

    member: the verdict whose case is bisected; None: the slowest of the alert.
    """
    if place.button(
        f"Measure alert {row.id} again", key=f"again-{row.id}", icon=":material/replay:"
    ):
        _measure_again(database, row)
    problem = no_bisection_reason(row)
    if place.button(
        f"Bisect alert {row.id}",
        key=f"bisect-{row.id}",
        icon=":material/account_tree:",
        disabled=bool(problem),
        help=problem or "Compare commits between the last good and the first bad one on this GPU.",
    ):
        _bisect(database, row, member)


def no_bisection_reason(row: AlertRow) -> str:
    """Return the reason why no bisection is possible; empty: it is possible."""
    if row.good is None:
        return "It was already bad when it was first measured, so there is no last good commit."
    if row.bad.project:
        return "Commits of another repository: bisect in a clone of it (flexq-bench bisect)."
    if is_one_step(row):
        return "No commit lies between the last good and the first bad one."
    return ""


def show_requests(database: Database, alert: int | None = None) -> None:
    """Show the requests queued by these buttons, of one alert or of all, and their progress."""
    requests = _requests(database, alert)
    with database.session() as session:
        live = queries.workers(session, live=True, limit=1)
    if not live:
        st.caption("No worker is alive: requests wait until one is started (flexq-bench worker).")
    if requests:
        is_open = any(request.state in OPEN_REQUEST_STATES for request in requests)
        st.fragment(_progress, run_every=_REFRESH_INTERVAL if is_open else None)(database, alert)


def _requests(database: Database, alert: int | None) -> list[RequestRow]:
    with database.session() as session:
        if alert is None:
            return queries.requests(session, requester_prefix=f"{_REQUESTER} ", limit=MAX_LISTED)
        return queries.requests(session, requester=f"{_REQUESTER} {alert}", limit=MAX_LISTED)


def _measure_again(database: Database, row: AlertRow) -> None:
    from flexq_bench.fleet.requests import sweep_request  # imports torch

    gpu = row.gpus[0] if row.gpus else ""
    try:
        with database.session() as session:
            members = queries.alert_decisions(session, row.id)
            request = sweep_request(
                session, _sweep_of(members), requester=_requester_name(row), gpu=gpu
            )
        write_request(request)
    except (FlexqError, WorkloadError, KernelError, DatabaseError) as error:
        st.error(as_text(str(error)))
        return
    _show_queued(f"Queued as request {request.uuid[:8]}: {request.cases} cases on {gpu}.")


def _bisect(database: Database, row: AlertRow, member: DecisionRow | None) -> None:
    from flexq_bench.fleet.requests import Bisection, bisect_request

    assert row.good is not None  # else the button is disabled
    try:
        with database.session() as session:
            decision = member or next(iter(queries.alert_decisions(session, row.id)), None)
            if decision is None or not can_be_repeated(decision):
                st.error("Another tool measured this: there is nothing to compare commits with.")
                return
            bisection = Bisection(case_of(decision), row.good.sha, row.bad.sha)
            requester = _requester_name(row)
            for stored in queries.requests(
                session, states=OPEN_REQUEST_STATES, requester=requester
            ):
                if stored.content == bisection.as_data():  # its comparisons take hours
                    st.info(
                        f"Request {stored.uuid[:8]} already covers this bisection and is "
                        f"{stored.state}."
                    )
                    return
            request = bisect_request(session, bisection, requester=requester, gpu=decision.gpu)
        write_request(request)
    except (FlexqError, WorkloadError, KernelError, DatabaseError) as error:
        st.error(as_text(str(error)))
        return
    _show_queued(
        f"Queued as request {request.uuid[:8]}: a bisection of {bisection.case.key}, at most "
        f"{request.cases} comparisons on {decision.gpu}."
    )


def _show_queued(words: str) -> None:
    st.success(as_text(words), icon=":material/check:")


def _requester_name(row: AlertRow) -> str:
    return f"{_REQUESTER} {row.id}"


def _sweep_of(members: Sequence[DecisionRow]) -> Sweep:
    """Return a sweep over the kernels, shapes and M, and other workloads of an alert's verdicts.

    Raises UsageError if another tool measured them.
    """
    cases = [case_of(member) for member in members if can_be_repeated(member)]
    if not cases:
        raise UsageError("another tool measured this: import its new results")
    gemms = [case.workload for case in cases if isinstance(case.workload, GemmWorkload)]
    others = {case.workload for case in cases if isinstance(case.workload, OperationWorkload)}
    return Sweep(
        tuple(sorted({case.label for case in cases})),
        tuple(sorted({gemm.m for gemm in gemms})),
        tuple(
            Shape(n, k, layer="", model="") for n, k in sorted({(gemm.n, gemm.k) for gemm in gemms})
        ),
        workloads=tuple(sorted(others)),
    )


def _progress(database: Database, alert: int | None) -> None:
    zone = time_zone(st.context.timezone)
    rows = [
        {
            "request": page_address("sweep", request=row.uuid[:8]) if row.kind == "sweep" else None,
            "for alert": row.requester.removeprefix(f"{_REQUESTER} "),
            "what": "bisection" if row.kind == "bisect" else row.kind,
            "state": row.state,
            "result": row.detail,
            "measured": page_address("results", run=row.run[:8]) if row.run else None,
            "cases": row.cases if row.kind != "bisect" else None,
            "requested": local_time(row.created_at, zone),
        }
        for row in _requests(database, alert)
    ]
    draw_table(
        rows,
        column_config={
            "request": st.column_config.LinkColumn(display_text=r"request=(.*)$"),
            "measured": st.column_config.LinkColumn(display_text=r"run=(.*)$"),
        },
        key="requests",
    )
