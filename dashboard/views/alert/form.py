"""The form that triages an alert: its state and a note."""

from __future__ import annotations

import streamlit as st

from dashboard.database import is_read_only, write_alert
from dashboard.shared.formatting import as_text
from db.decisions import ALERT_STATES, STATES_WITH_A_REASON
from db.errors import DatabaseError
from db.queries import AlertRow

_SAVED = "alert-form.saved"  # what the last run of the page stored, to be told once
_LONGEST_NOTE, _LONGEST_NAME = 10_000, 80  # letters; the server too takes no more
_MEANING = {
    "acknowledged": "acknowledged: somebody is on it",
    "explained": "explained: wanted or accepted; its series start anew at the first bad commit",
    "fixed": "fixed: the level is back",
    "false-alarm": "false-alarm: there was nothing",
}


def show_form(alert: AlertRow, events: int) -> None:
    """Set a state, a note or both. A read-only app says why it has no form.

    events: how many the alert has. Who fills in the form while somebody else changes the alert is
    told, and keeps what they wrote.
    """
    st.header("Triage", anchor=False)
    if is_read_only():
        st.caption("This dashboard is read-only: states and notes can't be changed here.")
        return
    saved = st.session_state.pop(_SAVED, None)
    if saved is not None:
        st.success(as_text(saved), icon=":material/check:")
    mine = f"alert-form.{alert.id}"
    saves = st.session_state.get(f"{mine}.saves", 0)
    with st.form(f"{mine}.{saves}"):  # after each save a new one, without the old words
        options = [alert.state, *(s for s in ALERT_STATES[1:] if s != alert.state)]
        state = st.selectbox(
            "State",
            options,
            format_func=lambda name: (
                f"{name} (as it is)" if name == alert.state else _MEANING[name]
            ),
        )
        note = st.text_area(
            "Note", max_chars=_LONGEST_NOTE, help="Kept as text, with your name and the time."
        )
        person = st.text_input("Your name", max_chars=_LONGEST_NAME)
        sent = st.form_submit_button("Save", icon=":material/save:")
    # A click runs the page anew: what was seen is what the page showed before it.
    seen = st.session_state.get(f"{mine}.seen", events) if sent else events
    st.session_state[f"{mine}.seen"] = events
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
    st.session_state[f"{mine}.saves"] = saves + 1
    st.session_state[_SAVED] = f"Saved: alert {alert.id} is {state}."
    st.rerun()


def _problem(alert: AlertRow, state: str, note: str, person: str) -> str:
    """Explain why the form can't be saved; empty: it can."""
    if state == alert.state and not note:
        return "Nothing to save: choose another state, or write a note."
    if state in STATES_WITH_A_REASON and not note:
        return f"Write a note that says why it is {state}."
    if not person:
        return "Write your name: people will want to ask you."
    return ""
