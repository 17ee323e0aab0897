"""Open alerts, failed gates and broken nights, whichever command stored them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import streamlit as st

from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.shared.formatting import (
    alert_title,
    as_code,
    as_text,
    local_time,
    short_commit,
)
from flexq_bench.dashboard.shared.gates import deciding_limit, marked
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.dashboard.shared.project import project_title
from flexq_bench.dashboard.shared.static_table import draw_static_table, link
from flexq_bench.dashboard.views.alert import page as alert
from flexq_bench.dashboard.views.triage import page as triage
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.queries import AlertRow, GateRow, Judgement, NightState, RunSummary
from flexq_bench.verdicts import Verdict

_MAX_ALERTS = 10  # open alerts shown; Triage has all
_MAX_GATES = 10
_STALLED = timedelta(hours=6)  # since the last step of an unfinished night
_VERDICTS = (
    *(Verdict.SLOWER, Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.INCORRECT),
    *(Verdict.SAME, Verdict.NO_DATA),
)
_FAILING = (Verdict.SLOWER.value, Verdict.INCORRECT.value)


def show_decisions(
    database: Database,
    open_alerts: Sequence[AlertRow],
    judged: Sequence[Judgement],
    gates: Sequence[GateRow],
    nights: Sequence[RunSummary],
    zone: tzinfo,
) -> None:
    """Show all that waits for a decision; if nothing does, what that statement is based on.

    nights: the last scheduled run of each suite and project.
    """
    with database.session() as session:
        broken = _broken_nights(session, nights, zone)
    failed = failed_judgements(judged)
    refused = [gate for gate in gates if gate.verdict != "pass"]
    _show_alerts(open_alerts, zone)
    if failed:
        st.markdown("**Gates of kernels that failed**")
        draw_static_table(verdict_rows(failed[:_MAX_GATES], zone), "Failed gates of kernels")
    if refused:
        st.markdown("**Accuracy gates that did not pass**")
        gates_shown = [_accuracy_gate(gate, zone) for gate in refused[:_MAX_GATES]]
        draw_static_table(gates_shown, "Accuracy gates", {"limits": link("limits")})
    if broken:
        st.markdown("**Nights that are broken**")
        draw_static_table(broken, "Broken nights", {"run": link(r"run=(.*)$")})
        resume = command_on(database, "nightly", "--resume", "RUN")
        st.caption(f"The reason of each is in {command_on(database, 'status')}; resume: {resume}")
    if not (open_alerts or failed or refused or broken):
        _say_nothing_waits(judged, gates, nights)


def failed_judgements(judged: Sequence[Judgement]) -> list[Judgement]:
    """Return the gates that found something slower or wrong, newest first.

    Of a commit that was judged several times on a device, only the last counts.
    """
    last: dict[tuple[object, ...], Judgement] = {}
    for row in judged:
        if not row.watched:
            last.setdefault((row.project, row.gpu, row.heads), row)
    return [row for row in last.values() if any(row.verdicts.get(name) for name in _FAILING)]


def verdict_rows(judged: Sequence[Judgement], zone: tzinfo) -> list[dict[str, Any]]:
    """Return one row per night or gate, with its number of decisions by verdict."""
    return [
        {
            "GPU": row.gpu,
            "of": "watched branch" if row.watched else "other commits",
            **{verdict.value: row.verdicts.get(verdict.value, 0) for verdict in _VERDICTS},
            "commit": ", ".join(short_commit(sha, dirty=False) for sha in row.heads),
            "project": project_title(row.project),
            "judged": local_time(row.created_at, zone),
        }
        for row in judged
    ]


def _show_alerts(alerts: Sequence[AlertRow], zone: tzinfo) -> None:
    for row in alerts[:_MAX_ALERTS]:
        series = "1 series" if len(row.series) == 1 else f"{len(row.series)} series"
        with st.container(border=True, gap="xsmall"):
            st.page_link(
                alert.page.as_link(),
                label=as_text(f"{alert_title(row)}, {series}"),
                icon=":material/notification_important:",
                query_params={"alert": str(row.id)},
            )
            st.caption(_facts(row, zone))
    if len(alerts) > _MAX_ALERTS:
        st.page_link(triage.page.as_link(), label=f"All {len(alerts)} open alerts")


def _facts(row: AlertRow, zone: tzinfo) -> str:
    good = short_commit(row.good.sha, dirty=False) if row.good else ""
    parts = [
        f"**{as_text(row.state)}**",
        as_text(", ".join(row.gpus)),
        as_text(row.bad.project),
        as_code(f"{good}..{short_commit(row.bad.sha, dirty=False)}"),
        as_text(f"{row.bad.subject} ({row.bad.author or 'author unknown'})"),
        as_text(local_time(row.opened_at, zone)),
        as_text(row.note),
    ]
    return " · ".join(part for part in parts if part)


def _accuracy_gate(gate: GateRow, zone: tzinfo) -> dict[str, Any]:
    return {
        "model": gate.model,
        "scheme": gate.scheme,
        "verdict": marked(gate.verdict),
        "decided by": deciding_limit(gate),
        "limits": page_address("accuracy", model=gate.model, gate=gate.uuid[:8]),
        "checkpoint": (gate.content_hash or "")[:12],
        "policy": gate.policy,
        "commit": short_commit(gate.commit, gate.dirty),
        "when": local_time(gate.created_at, zone),
    }


def _broken_nights(
    session: Session, nights: Sequence[RunSummary], zone: tzinfo
) -> list[dict[str, Any]]:
    """Return the last scheduled runs with a problem, and stalled nights."""
    stalled: dict[str, NightState] = {
        night.run: night
        for night in queries.unfinished_nights(session)
        if datetime.now(UTC) - night.updated_at > _STALLED
    }
    rows = [
        _broken_row(run, problem, zone)
        for run in nights
        if run.uuid not in stalled and (problem := _problem_of(run))
    ]
    for run in queries.runs_by_uuid(session, list(stalled)):
        night = stalled[run.uuid]
        since = local_time(night.updated_at, zone)
        rows.append(_broken_row(run, f"night {night.name} is {night.state} since {since}", zone))
    return rows


def _problem_of(run: RunSummary) -> str:
    """Return what is wrong with a run, in words; empty: nothing, or it is still running."""
    wrong = [f"{run.statuses[s]} {s}" for s in ("incorrect", "failed") if run.statuses.get(s)]
    if run.status in ("failed", "interrupted"):
        wrong.insert(0, f"the run {'failed' if run.status == 'failed' else 'was interrupted'}")
    if run.missing and run.status != "running":
        wrong.append(f"{run.missing} of {run.planned} cases have no result")
    return ", ".join(wrong)


def _broken_row(run: RunSummary, problem: str, zone: tzinfo) -> dict[str, Any]:
    return {
        "suite": run.suite,
        "problem": problem,
        "GPU": ", ".join(run.gpus),
        "run": page_address("results", run=run.uuid[:8]),
        "commit": short_commit(run.commit, run.dirty),
        "project": project_title(run.project),
        "started": local_time(run.created_at, zone),
    }


def _say_nothing_waits(
    judged: Sequence[Judgement], gates: Sequence[GateRow], nights: Sequence[RunSummary]
) -> None:
    """Say which of the three kinds were looked at: a kind without data is no good news."""
    good = [
        *(["No alert is open, and no gate failed."] if judged else []),
        *(["Every accuracy gate passed."] if gates else []),
        *(["No scheduled run is broken."] if nights else []),
    ]
    missing = [
        *([] if judged else ["no night or gate compared commits lately"]),
        *([] if gates else ["no accuracy gate was run"]),
        *([] if nights else ["no run was scheduled"]),
    ]
    if good:
        st.success(" ".join(good), icon=":material/check_circle:")
    if missing:
        st.caption(f"Nothing is known of the rest: {', '.join(missing)}.")
