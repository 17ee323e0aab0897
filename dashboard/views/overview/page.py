"""Overview: open alerts, verdicts of the latest nightly run, and failed cases."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

import streamlit as st

from flexq_bench.dashboard.database import gate_command, show_empty_database
from flexq_bench.dashboard.pages import app_page
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import (
    alert_title,
    as_code,
    as_text,
    local_time,
    short_commit,
    time_zone,
)
from flexq_bench.dashboard.shared.runs import (
    OTHER_SUITES,
    ShownRuns,
    advise,
    choose_suite,
    first_runs,
)
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.alert import page as alert
from flexq_bench.dashboard.views.overview.tables import problem_rows, run_rows
from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.queries import SCHEDULED, SWEEP, AlertRow, FalseAlarmRow, NightRow, RunSummary
from flexq_bench.verdicts import Verdict

_MAX_ALERTS = 30  # open alerts shown; `alerts list` has all


@app_page("Overview", icon=":material/dashboard:")
def page(database: Database) -> None:
    """Show alerts, verdicts, the false-alarm rate and the latest runs."""
    with database.session() as session:
        suites = [name for name in queries.suite_names(session) if name not in OTHER_SUITES]
        open_alerts = queries.alerts(session, states=OPEN_STATES)
        nights = queries.latest_nights(session)
        rates = queries.false_alarm_rates(session, limit=1)
    if not suites and not nights:
        show_empty_database(database)
        return
    zone = time_zone(st.context.timezone)
    _show_alerts(open_alerts, nights, zone)
    _show_verdicts(nights, database, zone)
    _show_false_alarms(rates, database, zone)
    _show_runs(suites, database, zone)


def _show_alerts(alerts: Sequence[AlertRow], nights: Sequence[NightRow], zone: tzinfo) -> None:
    st.header("Open alerts", anchor=False)
    if not alerts and nights:
        st.success("No alert is open.", icon=":material/check_circle:")
    elif not alerts:
        st.info("No alert is open: no commit was compared with another one yet.")
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
        st.caption(
            f"{len(alerts) - _MAX_ALERTS} older ones are open too: the Alert page lists all."
        )


def _facts(row: AlertRow, zone: tzinfo) -> str:
    good = short_commit(row.good.sha, dirty=False) if row.good else ""
    parts = [
        f"**{as_text(row.state)}**",
        as_text(", ".join(row.gpus)),
        as_code(f"{good}..{short_commit(row.bad.sha, dirty=False)}"),
        as_text(f"{row.bad.subject} ({row.bad.author or 'author unknown'})"),
        as_text(local_time(row.opened_at, zone)),
        as_text(row.note),
    ]
    return " · ".join(part for part in parts if part)


def _show_verdicts(nights: Sequence[NightRow], database: Database, zone: tzinfo) -> None:
    st.header("Verdicts of the latest nightly run", anchor=False)
    if not nights:
        st.info(
            "No verdict is stored yet. Compare a commit with the one before it, interleaved A/B on "
            f"one GPU: {gate_command(database, '--alert')}",
            icon=":material/balance:",
        )
        return
    rows = [
        {
            "GPU": night.gpu,
            **{verdict.value: night.verdicts.get(verdict.value, 0) for verdict in _VERDICTS},
            "commit": ", ".join(short_commit(sha, dirty=False) for sha in night.heads),
            "judged": local_time(night.created_at, zone),
        }
        for night in nights
    ]
    draw_table(rows, key="verdicts")
    st.caption("Number of comparisons of two commits by verdict and kind of GPU.")


_VERDICTS = (
    *(Verdict.SLOWER, Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.INCORRECT),
    *(Verdict.SAME, Verdict.NO_DATA),
)


def _show_false_alarms(rates: Sequence[FalseAlarmRow], database: Database, zone: tzinfo) -> None:
    st.header("False alarms", anchor=False)
    if not rates:
        st.info(
            "The rate is not known: no commit was compared with itself yet. "
            f"Compare one: {gate_command(database, base='HEAD')}",
            icon=":material/science:",
        )
        return
    now = rates[0]
    st.markdown(
        f"**{now.rate:.1%}** of the comparisons of a commit with itself were called slower or "
        f"faster ({now.confidence:.0%} interval {now.low:.1%} to {now.high:.1%}): "
        f"{now.alarms} of {now.canaries}, {as_text(local_time(now.since, zone))} to "
        f"{as_text(local_time(now.until, zone))}."
    )


def _show_runs(suites: Sequence[str], database: Database, zone: tzinfo) -> None:
    st.header("Latest runs", anchor=False)
    controls = Controls("overview")
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
        show_empty_database(database)
        return
    draw_table(
        run_rows(by_gpu, distinct, outcomes, zone),
        key="runs",
    )
    st.caption(
        "The newest run on each kind of GPU, scheduled ones first. Planned and missing are of the "
        "whole run, the other counts of the cases on this GPU."
    )
    for line in advise(ShownRuns(distinct, None), [], database):
        st.warning(line, icon=":material/hourglass_disabled:")
    problems = problem_rows(distinct, outcomes, missing_by_run)
    if problems:
        st.markdown("**What did not run, or ran wrong, and why**")
        draw_table(problems, key="problems")


def _newest_runs(session: Session, suite: str | None, *, everything: bool) -> dict[str, RunSummary]:
    """Return the run to show for each GPU: a scheduled one, else a manual one on a GPU, else any.

    everything: the newest run of any kind.
    """
    if everything or suite:
        return queries.latest_runs(session, suite=suite, without_suites=OTHER_SUITES)
    by_hand = {"backend": "cuda", "without_triggers": (SWEEP,)}
    return first_runs(session, ({"backend": "cuda", "trigger": SCHEDULED}, by_hand, {}))
