"""Sweep: request a sweep of the fleet, follow its progress, see curves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo

import streamlit as st

from flexq_bench.dashboard.database import errors_shown
from flexq_bench.dashboard.pages import RUNS, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import kernel_styles
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, local_time, time_zone
from flexq_bench.dashboard.shared.results_frame import results_frame
from flexq_bench.dashboard.shared.results_table import show_table
from flexq_bench.dashboard.views.sweep.charts import AXES, VALUES, curves, with_ends
from flexq_bench.dashboard.views.sweep.form import show_form
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import AmbiguousError, NotFoundError
from flexq_bench.db.queries import RequestRow
from flexq_bench.db.requests import OPEN_REQUEST_STATES
from flexq_bench.stats.baseline import BASELINE

_MAX_REQUESTS = 50  # newest requests in the list; older ones can be opened by link
_REFRESH_INTERVAL_S = 2.0  # refresh interval of an open request
_SWEEP = "sweep"


@app_page("Sweep", section=RUNS, icon=":material/tune:")
def page(database: Database) -> None:
    """Show the form, and progress and curves of the selected request."""
    now = datetime.now(UTC)
    with database.session() as session:
        workers = queries.workers(session, live=True)
    queued = show_form(database, workers, now)
    if queued is not None:
        # Select the new request; the control would keep its old value.
        st.session_state.pop("sweep.request", None)
        st.query_params["request"] = queued[:8]
        st.rerun()
    _show_requests(database)


def _show_requests(database: Database) -> None:
    st.header("Requests", anchor=False)
    listed = _list(database)
    if not listed:
        st.info("No sweep was requested yet.")
        return
    controls = Controls("sweep")
    on_top = st.empty()
    zone = time_zone(st.context.timezone)
    chosen = controls.select_row(
        "request", "Request", listed, lambda row: _title(row, zone), always_in_url=True
    )
    row = st.container(horizontal=True, gap="large")
    sizes = [axis for axis in AXES if _varies(chosen, axis)] or ["m"]
    axis = controls.select(
        row, "over", "Over", sizes, format_func=lambda name: AXES[name], radio=True
    )
    value = controls.select(
        row, "show", "Show", list(VALUES), "median_us",
        format_func=lambda name: VALUES[name][0], radio=True,
    )  # fmt: skip
    controls.warn_of_ignored(on_top, "Not requested, so not shown")
    is_open = chosen.state in OPEN_REQUEST_STATES
    watch = st.fragment(_watch, run_every=_REFRESH_INTERVAL_S if is_open else None)
    watch(database, chosen.uuid, axis, value, is_open=is_open)


def _list(database: Database) -> list[RequestRow]:
    with database.session() as session:
        listed = [r for r in queries.requests(session, limit=_MAX_REQUESTS) if r.kind == _SWEEP]
        for prefix in st.query_params.get_all("request"):
            if any(row.uuid.startswith(prefix) for row in listed):
                continue
            try:
                listed.append(queries.request_by_uuid_prefix(session, prefix))
            except (NotFoundError, AmbiguousError):
                continue  # the control shows that it is missing
    return listed


def _varies(request: RequestRow, axis: str) -> bool:
    """Return True if the sweep has several values of this size."""
    if axis == "m":
        return len(request.content.get("m", ())) > 1
    return len({shape.get(axis) for shape in request.content.get("shapes", ())}) > 1


def _watch(database: Database, uuid: str, axis: str, value: str, *, is_open: bool) -> None:
    """Show the progress and results of a sweep; reload the page once it has ended."""
    with errors_shown():
        with database.session() as session:
            request = queries.request_by_uuid_prefix(session, uuid)
            results = queries.run_results(session, request.run) if request.run else []
            kernels = queries.kernel_names(session)
        if is_open and request.state not in OPEN_REQUEST_STATES:
            st.rerun()  # the whole page, to stop the refresh
        _show_progress(request, len(results))
        frame = results_frame(results, BASELINE)
        shown = frame[~frame["is_probe"]]
        points = with_ends(shown[shown["m"].notna()], value)  # of linear layers
        if points.empty:
            if results and not is_open:
                st.info("Nothing to draw here: see the table; Kernels draws other operations.")
        else:
            used = zip(shown["kernel"], shown["variant"], strict=True)
            draw_chart(curves(points, kernel_styles(kernels, used), axis, value), key="curves")
            st.caption("Bars are 95 % intervals. Probes are not drawn.")
        if not shown.empty:
            show_table(shown, BASELINE, time_zone(st.context.timezone))


def _show_progress(request: RequestRow, received: int) -> None:
    done = min(received, request.cases)
    facts = [
        f"**{as_text(request.state)}**",
        as_text(f"{done} of {request.cases} results"),
        as_text(f"requested by {request.requester}"),
        f"run {as_code(request.run[:8])}" if request.run else "no run yet",
        as_text(request.detail),
    ]
    st.markdown(" · ".join(fact for fact in facts if fact))
    if request.state in OPEN_REQUEST_STATES:
        st.progress(done / max(request.cases, 1))


def _title(request: RequestRow, zone: tzinfo) -> str:
    kernels: Sequence[str] = request.content.get("kernels", ())
    return " · ".join(
        (
            request.uuid[:8],
            ", ".join(str(kernel) for kernel in kernels),
            request.gpu or "any GPU",
            request.requester,
            local_time(request.created_at, zone),
        )
    )
