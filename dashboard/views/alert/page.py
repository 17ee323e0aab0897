"""Alert: a regression with its commits, evidence, history and events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

import streamlit as st

from flexq_bench.dashboard.database import gate_command, is_read_only
from flexq_bench.dashboard.pages import HOME, app_page
from flexq_bench.dashboard.shared.alert_requests import show_buttons, show_requests
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import (
    alert_title,
    as_change,
    as_code,
    as_text,
    local_time,
    short_commit,
    time_zone,
)
from flexq_bench.dashboard.shared.links import ALERT, commit_url
from flexq_bench.dashboard.shared.project import current_project
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.alert.evidence import show_evidence
from flexq_bench.dashboard.views.alert.form import show_form
from flexq_bench.dashboard.views.alert.history import show_series
from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.queries import AlertEventRow, AlertRow, CommitRow, DecisionRow
from flexq_bench.results.alert_commands import alert_commands
from flexq_bench.verdicts import history_verdict
from flexq_bench.verdicts.texts import decision_text
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.operation import describe

_URL = ALERT


@app_page("Alert", section=HOME, is_detail=True, icon=":material/notifications:", writes_title=True)
def page(database: Database) -> None:
    """Show the alert selected by `?alert=3`; by default the newest open one of the project."""
    with database.session() as session:
        alerts = queries.alerts(session)
        project = current_project(session)
    if not alerts:
        st.title("Alert")
        _show_no_alerts(database)
        return
    requested = st.query_params.get(_URL)
    if requested is not None and requested not in {str(row.id) for row in alerts}:
        st.title("Alert")
        st.warning(f"There is no alert {as_text(requested)} in {as_code(database.url)}.")
        st.page_link(page.as_link(), label="Show the newest alert", icon=":material/arrow_forward:")
        return
    # Stable: of alerts that are alike in both, the newest is first.
    newest = min(alerts, key=lambda row: (row.bad.project != project, row.state not in OPEN_STATES))
    if requested is None:
        st.query_params[_URL] = str(newest.id)
        st.rerun()  # above the page, its project is shown
    _show(database, alerts, newest)


def _show(database: Database, alerts: Sequence[AlertRow], newest: AlertRow) -> None:
    controls = Controls(_URL)
    by_id = {row.id: row for row in alerts}
    chosen = controls.select(
        st.sidebar,
        _URL,
        "Alert",
        list(by_id),
        newest.id,
        format_func=lambda alert_id: (
            f"{alert_id} · {by_id[alert_id].family} · {by_id[alert_id].state}"
        ),
        always_in_url=True,
    )
    row, zone = by_id[chosen], time_zone(st.context.timezone)
    with database.session() as session:
        members = queries.alert_decisions(session, row.id)
        events = queries.alert_events(session, row.id)
        between = _commits_of(session, row)
    st.title(as_text(alert_title(row)), anchor=False)
    if row.bad.project:
        st.caption(as_text(f"Project {row.bad.project}"))
    _show_state(row, zone)
    _show_commits(row, between)
    if members:
        _show_members(members)
        member = _choose_member(controls, members)
        with database.session() as session:
            kernels = queries.kernel_names(session)
            show_evidence(session, member, kernels)
            show_series(session, row, member, kernels)
        _show_commands(row, member, database)
    else:
        st.info("No verdict is a member of this alert.")
    show_form(row, len(events))
    _show_events(events, zone)


def _show_no_alerts(database: Database) -> None:
    st.info(
        "No alert was ever opened. An alert opens if a comparison with the previous commit shows "
        f"that a commit is slower or wrong: {gate_command(database, '--alert')}",
        icon=":material/notifications_off:",
    )


def _show_state(row: AlertRow, zone: tzinfo) -> None:
    series = "1 series" if len(row.series) == 1 else f"{len(row.series)} series"
    closed = f", closed {local_time(row.closed_at, zone)}" if row.closed_at else ""
    st.markdown(
        f"**{as_text(row.state)}** · opened {as_text(local_time(row.opened_at, zone) + closed)} · "
        f"{series} on {as_text(', '.join(row.gpus) or 'no GPU')}"
    )
    if row.note:
        st.markdown(f"Note: {as_text(row.note)}")


def _commits_of(session: Session, row: AlertRow) -> list[CommitRow]:
    """Return the last good commit, the measured ones after it, and the first bad one."""
    good, bad = row.good, row.bad
    if good is None:
        return [bad]
    if good.topo_order is None or bad.topo_order is None:
        return [good, bad]
    between = (good.topo_order, bad.topo_order)
    return [good, *queries.commits_between(session, *between, project=bad.project)]


def _show_commits(row: AlertRow, commits: Sequence[CommitRow]) -> None:
    st.header("Commits", anchor=False)
    marks = {row.bad.sha: "first seen bad"}
    if row.good is not None:
        marks[row.good.sha] = "last good"
    table = [
        {
            "range": marks.get(commit.sha, ""),
            "commit": short_commit(commit.sha, dirty=False),
            "subject": commit.subject or "(unknown)",
            "author": commit.author or "(unknown)",
            "look": commit_url(commit.sha),
        }
        for commit in commits
    ]
    look = st.column_config.LinkColumn(display_text="open", help="this commit, where it is kept")
    draw_table(table, drop_empty=True, column_config={"look": look}, key="commits")
    st.caption(_range_in_words(row))


def _range_in_words(row: AlertRow) -> str:
    if row.good is None:
        return "It was already bad when it was first measured, so there is no last good commit."
    if row.good.topo_order is None or row.bad.topo_order is None:
        return "The position of these commits in the ancestry is not known."
    wide = row.bad.topo_order - row.good.topo_order
    if wide == 1:
        return "The two are adjacent, so the second one is the cause."
    return (
        f"The cause is one of {wide} commits. The list has only those with a measurement; "
        "bisect, below, measures the others."
    )


def _show_members(members: Sequence[DecisionRow]) -> None:
    st.header("Verdicts", anchor=False)
    table = [
        {
            "kernel": kernel_label(row.kernel, row.variant),
            "shape": describe(row.operation, row.shape),
            "stage": row.stage,
            "cache": row.cache,
            "verdict": row.verdict,
            "change": decision_text(row) or "–",
            "99 % bounds": _bounds(row),
            "cause": row.cause,
            "GPU": row.gpu,
            "commits": _commits_in_words(row),
            "reason": row.reason,
        }
        for row in members
    ]
    draw_table(table, key="members")
    st.caption("Change of the time of the later commit against the earlier one; + is slower.")


def _bounds(row: DecisionRow) -> str:
    if row.log_ratio is None:
        return "–"
    return f"{as_change(row.log_ratio_low)} to {as_change(row.log_ratio_high)}"


def _commits_in_words(row: DecisionRow) -> str:
    base = short_commit(row.base, dirty=False) if row.base else ""
    return f"{base}..{short_commit(row.head, dirty=False)}"


def _choose_member(controls: Controls, members: Sequence[DecisionRow]) -> DecisionRow:
    chosen = controls.select_row("verdict", "Evidence of", members, _name)
    controls.warn_of_ignored(st.container(), "Not a verdict of this alert, so not shown")
    return chosen


def _name(row: DecisionRow) -> str:
    label = kernel_label(row.kernel, row.variant)
    shape = describe(row.operation, row.shape)
    return f"{label} {shape} {row.stage} {row.cache} · {row.gpu} · {_commits_in_words(row)}"


def _show_commands(row: AlertRow, member: DecisionRow, database: Database) -> None:
    st.header("Reproduce", anchor=False)
    commands = alert_commands(row, member, database)
    st.markdown("Recompute the verdicts from their evidence:")
    st.code(commands.explain, language=None, wrap_lines=True)
    if commands.compare is None:
        reason = (
            f"Another tool measured this: it was judged {history_verdict.CAVEAT}."
            if member.detector == history_verdict.DETECTOR
            else "There is no last good commit to compare with."
        )
        st.caption(reason)
        return
    st.markdown("Repeat the interleaved A/B measurement, in a clone that holds both commits:")
    if commands.suite:
        st.caption("No suite of the package has this shape. Save this as the file that is named:")
        st.code(commands.suite, language="toml", wrap_lines=True)
    st.code(commands.compare, language=None, wrap_lines=True)
    if commands.bisect is None:
        st.caption("No commit lies between the last good and the first bad one: it is the latter.")
    else:
        st.markdown("Find the commit that did it:")
        st.code(commands.bisect, language=None, wrap_lines=True)
    if not is_read_only():
        st.markdown("Or let a worker do it:")
        show_buttons(st.container(horizontal=True), database, row, member)
        show_requests(database, row.id)


def _show_events(events: Sequence[AlertEventRow], zone: tzinfo) -> None:
    st.header("Events", anchor=False)
    table = [
        {
            "when": local_time(event.created_at, zone),
            "state": event.state,
            "by": event.person or "flexq-bench",
            "note": event.note,
        }
        for event in reversed(events)
    ]
    draw_table(table, key="events")
