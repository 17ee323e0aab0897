"""Triage: all alerts with their state, their level now, and what to do about them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pandas as pd
import streamlit as st

from dashboard.database import (
    current_database,
    errors_shown,
    is_read_only,
    write_alert,
    write_request,
)
from dashboard.shared.controls import Controls
from dashboard.shared.formatting import alert_title, as_text, local_time, zone_named
from dashboard.shared.freshness import show_freshness
from dashboard.shared.links import page_address
from dashboard.shared.tables import draw_table
from dashboard.views.triage.tables import assignee, assignment_note, triage_rows
from db import queries
from db.decisions import ALERT_STATES, OPEN_STATES, STATES_WITH_A_REASON
from db.engine import Database
from db.errors import DatabaseError
from db.queries import AlertRow, DecisionRow, RequestRow
from flexq_bench.errors import FlexqError
from flexq_bench.runs.alert_level import alert_level, series_of
from flexq_bench.runs.stored_noise import read_noise
from flexq_bench.runs.sweep import Sweep
from kernels.errors import KernelError
from workloads.case import kernel_label
from workloads.errors import WorkloadError
from workloads.suite import Shape

_OPEN, _ALL = "open", "all"
_KEEP = "(as it is)"
_SAVED = "triage.saved"
_LONGEST_NOTE, _LONGEST_NAME = 10_000, 80
_LISTED_REQUESTS = 20
_REQUESTER = "triage"


def as_page() -> st.Page:
    """Where the page is in the app."""
    return st.Page(page, title="Triage", icon=":material/assignment:", url_path="triage")


def page() -> None:
    """Every alert that passes the filters, then what to do with some of them."""
    st.title("Triage")
    with errors_shown():
        database = current_database()
        with database.session() as session:
            known = queries.alerts(session)
        if not known:
            st.info("No alert was ever opened.", icon=":material/notifications_off:")
            return
        show_freshness(database)
        controls = Controls("triage")
        on_top = st.empty()
        _show(controls, database, known)
        controls.warn_of_ignored(on_top, "Not among the alerts, so not asked for")
        controls.offer_to_clear()


def _show(controls: Controls, database: Database, known: Sequence[AlertRow]) -> None:
    with database.session() as session:
        events = {row.id: queries.alert_events(session, row.id) for row in known}
        noise = read_noise(session, series_of(known))
        higher = {one.id for one in queries.project_series(session) if one.direction == "higher"}
    people = {alert_id: assignee(of) for alert_id, of in events.items()}
    shown = _narrow(controls, known, people)
    levels = {row.id: alert_level(row, noise, higher_is_better=higher) for row in shown}
    if not shown:
        st.info("No alert passes all filters: take one away, or clear them all.")
        return
    zone = zone_named(st.context.timezone)
    percent = st.column_config.NumberColumn(format="%+.2f %%")
    draw_table(
        pd.DataFrame(triage_rows(shown, levels, people, zone)),
        column_config={
            "alert": st.column_config.LinkColumn(display_text=r"alert=(.*)$", pinned=True),
            "against the last good": percent,
        },
        key="alerts",
    )
    st.caption(
        "Now: the latest result of each series over its result at the last good commit, as a "
        "geometric mean, with the noise from run to run in its interval. It explains; an alert is "
        "fixed when an interleaved A/B measurement says so."
    )
    if is_read_only():
        st.caption("This dashboard is read-only: states and notes can't be changed here.")
        return
    saved = st.session_state.pop(_SAVED, None)
    if saved:
        st.success(as_text(saved), icon=":material/check:")
    _bulk_form(shown, {alert_id: len(of) for alert_id, of in events.items()})
    _measure_again(database, shown)


def _narrow(
    controls: Controls, known: Sequence[AlertRow], people: dict[int, str]
) -> list[AlertRow]:
    state = controls.one(
        st.container(), "state", "State", [_OPEN, *ALERT_STATES, _ALL], _OPEN, in_a_row=True
    )
    kernels = sorted({kernel for row in known for kernel in row.kernels})
    kernel = controls.many(st.sidebar, "kernel", "Kernel", kernels)
    gpu = controls.many(
        st.sidebar, "gpu", "GPU", sorted({gpu for row in known for gpu in row.gpus})
    )
    names = sorted({name for name in people.values() if name})
    person = controls.many(st.sidebar, "assigned", "Assigned to", names, nothing="anybody")
    states = OPEN_STATES if state == _OPEN else ALERT_STATES if state == _ALL else (state,)
    return [
        row
        for row in known
        if row.state in states
        and (not kernel or set(kernel) & set(row.kernels))
        and (not gpu or set(gpu) & set(row.gpus))
        and (not person or people[row.id] in person)
    ]


def _bulk_form(shown: Sequence[AlertRow], seen: dict[int, int]) -> None:
    """One state, assignment and note for several alerts."""
    st.subheader("Set several at once", anchor=False)
    by_id = {row.id: row for row in shown}
    with st.form("triage-form"):
        chosen = st.multiselect(
            "Alerts", list(by_id), format_func=lambda one: alert_title(by_id[one])
        )
        state = st.selectbox("State", [_KEEP, *ALERT_STATES[1:]])
        given_to = st.text_input("Assign to", max_chars=_LONGEST_NAME)
        note = st.text_area("Note", max_chars=_LONGEST_NOTE)
        person = st.text_input("Your name", max_chars=_LONGEST_NAME).strip()
        sent = st.form_submit_button("Save", icon=":material/save:")
    if not sent:
        return
    words = note.strip() or (assignment_note(given_to.strip()) if given_to.strip() else "")
    problem = _problem(chosen, state, words, person)
    if problem:
        st.error(problem)
        return
    done = []
    for one in chosen:
        new = by_id[one].state if state == _KEEP else state
        try:
            write_alert(one, new, seen_events=seen[one], person=person, note=words)
            if note.strip() and given_to.strip():
                to = assignment_note(given_to.strip())
                write_alert(one, new, seen_events=seen[one] + 1, person=person, note=to)
            done.append(str(one))
        except DatabaseError as error:
            st.error(as_text(f"Alert {one}: {error}"), icon=":material/database_off:")
    if done:
        st.session_state[_SAVED] = f"Saved: alerts {', '.join(done)}."
        if len(done) == len(chosen):
            st.rerun()


def _problem(chosen: Sequence[int], state: str, words: str, person: str) -> str:
    """What is missing; empty: nothing."""
    if not chosen:
        return "Choose the alerts that this is about."
    if state == _KEEP and not words:
        return "Nothing to save: choose a state, write a note, or assign them to somebody."
    if state in STATES_WITH_A_REASON and not words:
        return f"Write a note that says why they are {state}."
    return "" if person else "Write your name: people will want to ask you."


def _measure_again(database: Database, shown: Sequence[AlertRow]) -> None:
    """A button for each alert that queues a sweep of what it is about, and how far those are."""
    st.subheader("Measure again", anchor=False)
    with database.session() as session:
        live = queries.workers(session, live=True, limit=_LISTED_REQUESTS)
        asked = [
            one
            for one in queries.requests(session, limit=_LISTED_REQUESTS)
            if one.requester.startswith(_REQUESTER)
        ]
    if not live:
        st.caption("No worker is alive: what is queued here waits for one (flexq-bench worker).")
    for row in shown[:_LISTED_REQUESTS]:
        if st.button(
            as_text(f"Measure again: {alert_title(row)}"),
            key=f"again-{row.id}",
            icon=":material/replay:",
        ):
            _queue(database, row)
    if asked:
        _progress(asked)


def _queue(database: Database, row: AlertRow) -> None:
    from flexq_bench.fleet.requests import sweep_request  # brings torch

    with database.session() as session:
        members = queries.alert_decisions(session, row.id)
    gpu = row.gpus[0] if row.gpus else ""
    try:
        with database.session() as session:
            request = sweep_request(
                session, _sweep_of(members), requester=f"{_REQUESTER} {row.id}", gpu=gpu
            )
        write_request(request)
    except (FlexqError, WorkloadError, KernelError, DatabaseError) as error:
        st.error(as_text(str(error)))
        return
    st.success(
        as_text(f"Queued as request {request.uuid[:8]}: {request.cases} cases on {gpu}."),
        icon=":material/check:",
    )


def _sweep_of(members: Sequence[DecisionRow]) -> Sweep:
    """The kernels, shapes and M of the verdicts of an alert."""
    shapes = sorted({(one.n, one.k) for one in members})
    return Sweep(
        tuple(sorted({kernel_label(one.kernel, one.variant) for one in members})),
        tuple(sorted({one.m for one in members})),
        tuple(Shape(n, k, layer="", model="") for n, k in shapes),
    )


def _progress(asked: Sequence[RequestRow]) -> None:
    zone, now = zone_named(st.context.timezone), datetime.now(UTC)
    rows = [
        {
            "request": page_address("sweep", request=one.uuid[:8]),
            "for alert": one.requester.removeprefix(f"{_REQUESTER} "),
            "state": one.state,
            "cases": one.cases,
            "asked": local_time(one.created_at, zone),
            "results": page_address("results", run=one.run[:8]) if one.run else None,
            "why": one.detail,
        }
        for one in asked
        if one.created_at <= now
    ]
    draw_table(
        pd.DataFrame(rows),
        column_config={
            "request": st.column_config.LinkColumn(display_text=r"request=(.*)$"),
            "results": st.column_config.LinkColumn(display_text=r"run=(.*)$"),
        },
        key="requests",
    )
