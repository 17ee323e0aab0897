"""Fleet: workers, unfinished runs, quarantined cases, requests and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any

import streamlit as st

from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import RUNS, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import time_zone
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.fleet.charts import device_offsets
from flexq_bench.dashboard.views.fleet.tables import (
    device_rows,
    has_ended,
    is_abandoned,
    is_silent,
    progress_rows,
    quarantine_rows,
    request_rows,
    worker_rows,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.leases import LIVE_WORKER_STATES
from flexq_bench.db.queries import OffsetRow, WorkerRow
from flexq_bench.results.device_offsets import offsets_of_imported

_MAX_LISTED = 100  # of each kind, newest first
_MAX_RUNS = 20
_MAX_AGE = timedelta(days=7)


@app_page("Fleet", section=RUNS, icon=":material/dns:")
def page(database: Database) -> None:
    """Show workers, runs, quarantine, requests, offsets of GPUs and devices."""
    with database.session() as session:
        workers = queries.workers(session, limit=_MAX_LISTED)
        runs = queries.progress(session, limit=_MAX_RUNS)
        requests = queries.requests(session, limit=_MAX_LISTED)
        quarantined = queries.quarantined_jobs(session, limit=_MAX_LISTED)
        offsets = queries.device_offsets(session, limit=_MAX_LISTED)
        devices = queries.devices(session, limit=_MAX_LISTED)
        if not offsets:
            offsets = offsets_of_imported(session)
    zone, now = time_zone(st.context.timezone), datetime.now(UTC)
    controls = Controls("fleet")
    everything = controls.toggle(
        st.container(), "all", "Also ended workers and abandoned runs",
        hint=f"Workers that ended, or were last seen {_MAX_AGE.days} days ago, and unfinished runs "
        "as old as that without a leased job.",
    )  # fmt: skip
    ended = 0 if everything else sum(has_ended(worker, now, _MAX_AGE) for worker in workers)
    abandoned = 0 if everything else sum(is_abandoned(run, now, _MAX_AGE) for run in runs)
    if not everything:
        workers = [worker for worker in workers if not has_ended(worker, now, _MAX_AGE)]
        runs = [run for run in runs if not is_abandoned(run, now, _MAX_AGE)]
    if ended or abandoned:
        st.caption(f"Not listed: {ended} ended workers, {abandoned} abandoned runs.")
    _show_workers(workers, worker_rows(workers, now, zone), now, database)
    _show(
        "Runs that are not finished",
        progress_rows(runs, zone),
        "No run of the fleet is active.",
        key="progress",
        columns={
            "ended, %": st.column_config.ProgressColumn(format="%.0f %%", max_value=100),
            "left, GPU min": st.column_config.NumberColumn(
                format="%.1f", help="minutes of one GPU that its open jobs are expected to take"
            ),
        },
    )
    _show(
        "Quarantine",
        quarantine_rows(quarantined),
        "No case is quarantined.",
        key="quarantine",
        hint="Cases on which too many workers died: they are not measured again in their run. Fix "
        "the kernel, then start a new run.",
    )
    _show("Requests", request_rows(requests, zone), "No sweep was requested.", key="requests")
    _show_offsets(offsets)
    _show(
        "Devices",
        device_rows(devices, zone),
        "No device is stored yet: the first result adds one.",
        key="devices",
        hint="A board has one row per set of settings, for example power limit and vBIOS.",
        columns={"memory, GiB": st.column_config.NumberColumn(format="%.0f")},
    )


def _show_workers(
    workers: Sequence[WorkerRow], rows: list[dict[str, Any]], now: datetime, database: Database
) -> None:
    live = [worker for worker in workers if worker.state in LIVE_WORKER_STATES]
    silent = [worker for worker in live if is_silent(worker, now)]
    if not live:
        st.info(
            f"No worker is alive. On a machine with a GPU: {command_on(database, 'worker')}",
            icon=":material/power_off:",
        )
    if silent:
        st.warning(
            f"{len(silent)} of {len(live)} workers sent no heartbeat for two minutes or more. "
            "Check their hosts; their jobs return to the queue when the lease expires.",
            icon=":material/sensors_off:",
        )
    if workers:
        _show(
            "Workers",
            rows,
            "",
            key="workers",
            columns={
                "°C": st.column_config.NumberColumn(format="%.0f"),
                "measuring, h": st.column_config.NumberColumn(format="%.2f"),
            },
        )


def _show(
    title: str,
    rows: list[dict[str, Any]],
    otherwise: str,
    *,
    key: str,
    hint: str = "",
    columns: Mapping[str, Any] | None = None,
) -> None:
    """Show a table, or the text `otherwise` if it has no rows."""
    st.header(title, anchor=False)
    if not rows:
        st.caption(otherwise)
        return
    draw_table(rows, column_config=dict(columns or {}), key=key)
    if hint:
        st.caption(hint)


def _show_offsets(offsets: Sequence[OffsetRow]) -> None:
    st.header("Differences between GPUs of one kind", anchor=False)
    newest: dict[str, OffsetRow] = {}
    for row in offsets:  # newest first
        newest.setdefault(row.device, row)
    if not newest:
        st.caption(
            "Not known: no run here has three cases or more that several GPUs of one kind measured."
        )
        return
    draw_chart(
        device_offsets(sorted(newest.values(), key=attrgetter("gpu", "device"))), key="offsets"
    )
    st.caption("Of the newest run with each GPU. Bars are 95 % intervals; + is slower.")
