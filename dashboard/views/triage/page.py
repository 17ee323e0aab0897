"""Triage: all alerts with their state and current level, and actions on them."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from flexq_bench.dashboard.database import is_read_only, write_alert
from flexq_bench.dashboard.pages import HOME, app_page
from flexq_bench.dashboard.shared.alert_requests import MAX_LISTED, show_buttons, show_requests
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import alert_title, as_text, time_zone
from flexq_bench.dashboard.shared.freshness import show_freshness
from flexq_bench.dashboard.shared.noise import stored_noise
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.alert.form import MAX_NAME_LENGTH, MAX_NOTE_LENGTH
from flexq_bench.dashboard.views.triage.tables import assignee, assignment_note, triage_rows
from flexq_bench.db import queries
from flexq_bench.db.decisions import (
    ALERT_STATES,
    OPEN_STATES,
    STATES_OF_PEOPLE,
    STATES_WITH_A_REASON,
)
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.queries import AlertRow
from flexq_bench.results.alert_level import alert_level, series_of

_OPEN, _ALL = "open", "all"
_KEEP = "(unchanged)"
_SAVED = "triage.saved"


@app_page("Triage", section=HOME, icon=":material/assignment:")
def page(database: Database) -> None:
    """Show the alerts that match the filters, and forms for actions on them."""
    with database.session() as session:
        known = queries.alerts(session)
    if not known:
        st.info("No alert was ever opened.", icon=":material/notifications_off:")
        return
    show_freshness(database)
    with page_controls("triage", "Not among the alerts, so ignored") as controls:
        _show(controls, database, known)


def _show(controls: Controls, database: Database, known: Sequence[AlertRow]) -> None:
    with database.session() as session:
        events = {row.id: queries.alert_events(session, row.id) for row in known}
        higher = {s.id for s in queries.project_series(session) if s.direction == "higher"}
    noise = stored_noise(database, series_of(known))
    people = {alert_id: assignee(rows) for alert_id, rows in events.items()}
    shown = _narrow(controls, known, people)
    levels = {row.id: alert_level(row, noise, higher_is_better=higher) for row in shown}
    if not shown:
        st.info("No alert passes all filters: remove one, or clear them all.")
        return
    zone = time_zone(st.context.timezone)
    percent = st.column_config.NumberColumn(format="%+.2f %%")
    draw_table(
        triage_rows(shown, levels, people, zone),
        column_config={
            "alert": st.column_config.LinkColumn(display_text=r"alert=(.*)$", pinned=True),
            "against the last good": percent,
        },
        key="alerts",
    )
    st.caption(
        "Now: the latest result of each series over its result at the last good commit, as a "
        "geometric mean, with run-to-run noise in its interval. For information only: an alert is "
        "fixed when an interleaved A/B measurement confirms it."
    )
    if is_read_only():
        st.caption("This dashboard is read-only: states and notes can't be changed here.")
        return
    saved = st.session_state.pop(_SAVED, None)
    if saved:
        st.success(as_text(saved), icon=":material/check:")
    _bulk_form(shown, {alert_id: len(rows) for alert_id, rows in events.items()})
    _show_requests(database, shown)


def _narrow(
    controls: Controls, known: Sequence[AlertRow], people: dict[int, str]
) -> list[AlertRow]:
    state = controls.select(
        st.container(), "state", "State", [_OPEN, *ALERT_STATES, _ALL], _OPEN, radio=True
    )
    kernels = sorted({kernel for row in known for kernel in row.kernels})
    kernel = controls.multiselect(st.sidebar, "kernel", "Kernel", kernels)
    gpu = controls.multiselect(
        st.sidebar, "gpu", "GPU", sorted({gpu for row in known for gpu in row.gpus})
    )
    names = sorted({name for name in people.values() if name})
    person = controls.multiselect(
        st.sidebar, "assigned", "Assigned to", names, placeholder="anybody"
    )
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
    """Show a form that sets state, assignee and note of several alerts."""
    st.header("Edit several alerts", anchor=False)
    by_id = {row.id: row for row in shown}
    with st.form("triage-form"):
        chosen = st.multiselect(
            "Alerts", list(by_id), format_func=lambda alert_id: alert_title(by_id[alert_id])
        )
        state = st.selectbox("State", [_KEEP, *STATES_OF_PEOPLE])
        assignee_name = st.text_input("Assign to", max_chars=MAX_NAME_LENGTH)
        note = st.text_area("Note", max_chars=MAX_NOTE_LENGTH)
        person = st.text_input("Your name", max_chars=MAX_NAME_LENGTH).strip()
        sent = st.form_submit_button("Save", icon=":material/save:")
    if not sent:
        return
    words = note.strip() or (
        assignment_note(assignee_name.strip()) if assignee_name.strip() else ""
    )
    problem = _problem(chosen, state, words, person)
    if problem:
        st.error(problem)
        return
    done = []
    for alert_id in chosen:
        new = by_id[alert_id].state if state == _KEEP else state
        try:
            write_alert(alert_id, new, seen_events=seen[alert_id], person=person, note=words)
            if note.strip() and assignee_name.strip():
                assignment, events = assignment_note(assignee_name.strip()), seen[alert_id] + 1
                write_alert(alert_id, new, seen_events=events, person=person, note=assignment)
            done.append(str(alert_id))
        except DatabaseError as error:
            st.error(as_text(f"Alert {alert_id}: {error}"), icon=":material/database_off:")
    if done:
        st.session_state[_SAVED] = f"Saved: alerts {', '.join(done)}."
        if len(done) == len(chosen):
            st.rerun()


def _problem(chosen: Sequence[int], state: str, words: str, person: str) -> str:
    """Return a message if an input is missing, else an empty string."""
    if not chosen:
        return "Choose one or more alerts."
    if state == _KEEP and not words:
        return "Nothing to save: choose a state, write a note, or assign them to somebody."
    if state in STATES_WITH_A_REASON and not words:
        return f"Write a note that says why they are {state}."
    return "" if person else "Write your name, so that others can ask you."


def _show_requests(database: Database, shown: Sequence[AlertRow]) -> None:
    """Show buttons for each alert, and the progress of their requests."""
    st.header("Measure again, bisect", anchor=False)
    for row in shown[:MAX_LISTED]:
        line = st.container(horizontal=True, vertical_alignment="center")
        show_buttons(line, database, row)
        line.markdown(as_text(alert_title(row)))
    show_requests(database)
