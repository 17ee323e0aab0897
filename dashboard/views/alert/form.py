"""Triage form of an alert: its state and a note."""

from __future__ import annotations

import streamlit as st

from flexq_bench.dashboard.database import is_read_only, write_alert
from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.db.decisions import STATES_OF_PEOPLE, STATES_WITH_A_REASON
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.queries import AlertRow

_SAVED = "alert-form.saved"  # message of the last save, shown once after the rerun
MAX_NOTE_LENGTH, MAX_NAME_LENGTH = 10_000, 80  # characters; also enforced by the server
_MEANING = {
    "acknowledged": "acknowledged: under investigation",
    "explained": "explained: intended or accepted; a new epoch begins at the first bad commit",
    "fixed": "fixed: the level has returned",
    "false-alarm": "false-alarm: no real change",
}


def show_form(alert: AlertRow, events: int) -> None:
    """Show the form for state and note, or why a read-only app has none.

    events: number of the alert's events. If somebody else changes the alert while the form is being
    filled in, saving shows an error and keeps the input.
    """
    st.header("Triage", anchor=False)
    if is_read_only():
        st.caption("This dashboard is read-only: states and notes can't be changed here.")
        return
    saved = st.session_state.pop(_SAVED, None)
    if saved is not None:
        st.success(as_text(saved), icon=":material/check:")
    key = f"alert-form.{alert.id}"
    saves = st.session_state.get(f"{key}.saves", 0)
    with st.form(f"{key}.{saves}"):  # a new key after each save clears the input
        options = [alert.state, *(s for s in STATES_OF_PEOPLE if s != alert.state)]
        state = st.selectbox(
            "State",
            options,
            format_func=lambda name: (
                f"{name} (unchanged)" if name == alert.state else _MEANING[name]
            ),
        )
        note = st.text_area(
            "Note", max_chars=MAX_NOTE_LENGTH, help="Kept as text, with your name and the time."
        )
        person = st.text_input("Your name", max_chars=MAX_NAME_LENGTH)
        sent = st.form_submit_button("Save", icon=":material/save:")
    # A click reruns the page: compare with the number of events shown before the click.
    seen = st.session_state.get(f"{key}.seen", events) if sent else events
    st.session_state[f"{key}.seen"] = events
    if not sent:
        return
    problem = _problem(alert, state, note.strip(), person.strip())
    if problem:
        st.error(problem)
        return
    try:
        write_alert(alert.id, state, seen_events=seen, person=person.strip(), note=note.strip())
    except DatabaseError as error:
        st.error(as_text(str(error)), icon=":material/database_off:")
        return
    st.session_state[f"{key}.saves"] = saves + 1
    st.session_state[_SAVED] = f"Saved: alert {alert.id} is {state}."
    st.rerun()


def _problem(alert: AlertRow, state: str, note: str, person: str) -> str:
    """Return the reason why the form can't be saved; empty: it can."""
    if state == alert.state and not note:
        return "Nothing to save: choose another state, or write a note."
    if state in STATES_WITH_A_REASON and not note:
        return f"Write a note that says why it is {state}."
    if not person:
        return "Write your name, so that others can ask you."
    return ""
