"""Home: open alerts, failed gates and broken nights; the trend of each kernel; coverage."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

import streamlit as st

from flexq_bench.dashboard.database import command_on, gate_command, show_empty_database
from flexq_bench.dashboard.pages import HOME, app_page
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_text, local_time, time_zone
from flexq_bench.dashboard.shared.freshness import show_freshness
from flexq_bench.dashboard.shared.project import current_project
from flexq_bench.dashboard.shared.runs import (
    OTHER_SUITES,
    ShownRuns,
    advise,
    choose_suite,
    first_runs,
)
from flexq_bench.dashboard.shared.static_table import draw_static_table, link, number
from flexq_bench.dashboard.views.home.coverage_tables import problem_rows, run_rows
from flexq_bench.dashboard.views.home.decisions import show_decisions, verdict_rows
from flexq_bench.dashboard.views.home.trend import show_trend
from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.queries import SCHEDULED, SWEEP, FalseAlarmRow, Judgement, RunSummary
from flexq_bench.verdicts import alert_rule

_MAX_NIGHTS = 20  # newest scheduled runs that are checked


@app_page("Home", section=HOME, icon=":material/home:", is_default=True)
def page(database: Database) -> None:
    """Show what needs a decision, then the trend, then the coverage."""
    with database.session() as session:
        project = current_project(session)
        suites = [name for name in queries.suite_names(session) if name not in OTHER_SUITES]
        open_alerts = queries.alerts(session, states=OPEN_STATES)
        judged = queries.judgements(session, gate_detector=alert_rule.DETECTOR)
        gates = queries.latest_gates(session)
        nights = queries.last_nights(session, limit=_MAX_NIGHTS)
        rates = queries.false_alarm_rates(session, limit=1)
        has_models = queries.decoded_models(session) or queries.scored_models(session)
    if not (suites or open_alerts or judged or gates or nights or has_models):
        show_empty_database(database)
        return
    zone = time_zone(st.context.timezone)
    show_freshness(database)
    st.header("Needs a decision", anchor=False)
    show_decisions(database, open_alerts, judged, gates, nights, zone)
    st.header("Trend", anchor=False)
    _show_verdicts(judged, database, zone)
    show_trend(database, project, open_alerts)
    st.header("Coverage", anchor=False)
    if not nights:
        st.caption(f"No run was scheduled: {command_on(database, 'nightly')}")
    _show_runs(suites, database, zone)
    _show_false_alarms(rates, database, zone)


def _show_verdicts(judged: Sequence[Judgement], database: Database, zone: tzinfo) -> None:
    """Show the newest night and gate of each project and GPU."""
    if not judged:
        st.caption(
            "No recent verdict of a night or gate is stored. Compare a commit with the one before "
            f"it, interleaved A/B on one device: {gate_command(database, '--alert')}"
        )
        return
    newest: dict[tuple[object, ...], Judgement] = {}
    for row in judged:
        newest.setdefault((row.project, row.gpu, row.watched), row)
    draw_static_table(verdict_rows(list(newest.values()), zone), "Verdicts")
    st.caption("Comparisons of two commits by verdict: the newest of each kind on each device.")


def _show_false_alarms(rates: Sequence[FalseAlarmRow], database: Database, zone: tzinfo) -> None:
    if not rates:
        st.caption(
            "The rate of false alarms is not known: no commit was compared with itself. "
            f"Compare one: {gate_command(database, base='HEAD')}"
        )
        return
    now = rates[0]
    st.markdown(
        f"False alarms: **{now.rate:.1%}** of the comparisons of a commit with itself were called "
        f"slower or faster ({now.confidence:.0%} interval {now.low:.1%} to {now.high:.1%}): "
        f"{now.alarms} of {now.canaries}, {as_text(local_time(now.since, zone))} to "
        f"{as_text(local_time(now.until, zone))}."
    )


def _show_runs(suites: Sequence[str], database: Database, zone: tzinfo) -> None:
    controls = Controls("home")
    suite = choose_suite(st.sidebar, controls, suites)
    everything = controls.toggle(
        st.sidebar, "all", "Also sweeps and CPUs",
        hint="Without it: the newest run of a suite on each kind of GPU, scheduled ones first.",
    )  # fmt: skip
    for missing in controls.ignored:
        st.warning(f"Not stored, so ignored: {as_text(missing)}.")
    with database.session() as session:
        by_gpu = _newest_runs(session, suite or None, everything=everything)
        newest = queries.runs(session, suite=suite or None, without_suites=OTHER_SUITES, limit=1)
        if not everything:
            newest = [run for run in newest if run.trigger != SWEEP and not run.gpus]
        distinct = tuple({run.uuid: run for run in (*by_gpu.values(), *newest)}.values())
        outcomes = queries.run_outcomes(session, [run.uuid for run in distinct])
        missing_by_run = {
            run.uuid: queries.missing_cases(session, run.uuid) for run in distinct if run.missing
        }
    if not distinct:
        st.caption(f"No run of a suite is stored: {command_on(database, 'run', 'smoke')}")
        return
    draw_static_table(
        run_rows(by_gpu, distinct, outcomes, zone),
        "Runs",
        {"covered": number("{:.0f} %"), "run": link(r"run=(.*)$")},
    )
    st.caption(
        "The newest run on each kind of GPU, scheduled ones first. Covered: planned cases with a "
        "correct time. Planned and missing are of the whole run, the other counts of the cases on "
        "this device."
    )
    for line in advise(ShownRuns(distinct, None), [], database):
        st.warning(line, icon=":material/hourglass_disabled:")
    problems = problem_rows(distinct, outcomes, missing_by_run)
    if problems:
        st.markdown("**What did not run, or ran wrong, and why**")
        draw_static_table(problems, "Cases without a valid result")


def _newest_runs(session: Session, suite: str | None, *, everything: bool) -> dict[str, RunSummary]:
    """Return the run to show for each GPU: a scheduled one, else a manual one on a GPU, else any.

    everything: the newest run of any kind.
    """
    if everything or suite:
        return queries.latest_runs(session, suite=suite, without_suites=OTHER_SUITES)
    on_gpus = {"backend": "cuda"}
    scheduled = {"trigger": SCHEDULED}
    by_hand = {"without_triggers": (SWEEP,)}
    return first_runs(session, (on_gpus | scheduled, on_gpus | by_hand, scheduled, by_hand, {}))
