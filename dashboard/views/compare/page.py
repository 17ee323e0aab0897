"""Compare: two runs, two commits or two kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.database import command_on, gate_command, show_empty_database
from flexq_bench.dashboard.pages import EXPLORE, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import kernel_styles
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, short_commit, time_zone
from flexq_bench.dashboard.shared.latest_controls import choose_sweeps
from flexq_bench.dashboard.shared.model_places import (
    models_and_layers,
    narrowed_to,
    places_of_frame,
)
from flexq_bench.dashboard.shared.noise import stored_noise
from flexq_bench.dashboard.shared.project import current_project
from flexq_bench.dashboard.shared.runs import (
    OTHER_SUITES,
    choose_suite,
    default_runs,
    list_runs,
    run_title,
)
from flexq_bench.dashboard.views.compare import charts
from flexq_bench.dashboard.views.compare.frame import (
    APART,
    INTERLEAVED,
    ONE_RUN,
    Pair,
    compare_frame,
    mean_rows,
    pairs_of_labels,
    pairs_of_runs,
)
from flexq_bench.dashboard.views.compare.tables import show_means, show_rows
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import SWEEP, CommitRow, Filters, ResultRow, RunName
from flexq_bench.results.stored_comparison import newest_of_cases
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.runs import command_lines
from flexq_bench.stats.baseline import BASELINE
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import is_probe

_RUNS, _COMMITS, _KERNELS = "runs", "commits", "kernels"
_MAX_COMMITS = 200  # newest commits in the list; older ones can be opened by link
_MAX_CHANGES = 40  # changes in one chart; the table has all
_ANY = ""
_FILTERS = {  # column -> label
    "label": "Kernel",
    "gpu": "GPU",
    "regime": "Regime",
    "m": "M (tokens)",
    "verdict": "Verdict",
}
_APART = (
    "are of separate runs, which are not interleaved: the machine may cause the difference. Their "
    "intervals include run-to-run noise, and slower and faster require the whole interval beyond "
    "1 %."
)


@app_page("Compare", section=EXPLORE, icon=":material/compare_arrows:")
def page(database: Database) -> None:
    """Show the comparison of the two selected sides."""
    with database.session() as session:
        suites = [name for name in queries.suite_names(session) if name not in OTHER_SUITES]
    with page_controls("compare", "Not stored, so ignored") as controls:
        kind = controls.select(
            st.container(), "kind", "Compare two", list(_SIDES), _RUNS, radio=True
        )
        for other_kind in _SIDES:
            if other_kind != kind:  # remove parameters of other kinds from the link
                for side in ("base", "head"):
                    st.query_params.pop(f"{side}-{other_kind}", None)
        compared = _SIDES[kind](controls, database, suites)
        if compared is not None:
            _show(controls, database, compared)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Two compared sides. base, head: names for display.

    advice: how to measure both by interleaved A/B, as Markdown; empty: both are of one commit.
    """

    frame: pd.DataFrame
    base: str
    head: str
    advice: str
    noise: StoredNoise


def _two_runs(controls: Controls, database: Database, suites: Sequence[str]) -> _Compared | None:
    listed = list_runs(database, names=("base-runs", "head-runs"))
    if not listed:
        show_empty_database(database)
        return None
    suite = choose_suite(st.sidebar, controls, sorted({run.suite for run in listed}))
    by_uuid = {run.uuid: run for run in listed if suite in (_ANY, run.suite)}
    if len(by_uuid) < 2:
        st.info(
            "Only one run is stored: nothing to compare it with. Measure again: "
            f"{command_on(database, 'run', suite or 'smoke')}"
        )
        return None
    zone = time_zone(st.context.timezone)
    first, second = _default_pair(database, by_uuid)
    chosen = [
        controls.select(
            st.container(), f"{side}-runs", side.capitalize(), list(by_uuid), default,
            format_func=lambda uuid: run_title(by_uuid[uuid], zone),
            to_url=lambda uuid: uuid[:8], always_in_url=True,
        )
        for side, default in (("base", first), ("head", second))
    ]  # fmt: skip
    with database.session() as session:
        sides = queries.runs_by_uuid(session, chosen)
        base, head = (queries.run_results(session, uuid) for uuid in chosen)
        commits = [run.commit for run in sides]
        clean = not any(run.dirty for run in sides) and commits[0] != commits[1]
        decisions = queries.decisions_between(session, *commits) if clean else {}
        measured = {r.series_id for r in (*base, *head)}
    noise = stored_noise(database, measured)
    frame = compare_frame(
        _pairs(base, head, noise),
        {series: row for series, row in decisions.items() if series in measured},
    )
    first, second = (f"run {uuid[:8]}" for uuid in chosen)
    advice = ""
    if sides[0].project != sides[1].project:
        advice = _of_two_projects(*(run.project for run in sides))
    elif commits[0] != commits[1]:
        advice = _interleaved(commits, sides[1].project, by_uuid[chosen[1]].suite)
    return _Compared(frame, first, second, advice, noise)


def _interleaved(commits: Sequence[str], project: str, suite: str) -> str:
    """Return how to compare two commits; for a project: on the project's suite, in its clone."""
    on = ("--project", ".") if project else ("--suite", suite)
    return as_code(command_lines.command("compare", *(sha[:10] for sha in commits), *on))


def _of_two_projects(*names: str) -> str:
    """Explain how to compare kernels of two projects: their commits can't be in one comparison."""
    placeholders = {"": "KERNEL"} | {name: f"FILE_OF_{name}.KERNEL" for name in names if name}
    files = [part for name in names if name for part in ("--kernels-from", f"FILE_OF_{name}.py")]
    advice = command_lines.command("compare", *(placeholders[name] for name in names), *files)
    both = " and ".join(as_text(name or "flexq-bench") for name in names)
    return f"a kernel of each, as they are of two projects, {both}: {as_code(advice)}"


def _default_pair(database: Database, by_uuid: Mapping[str, RunName]) -> tuple[str, str]:
    """Return default base and head.

    head: the newest scheduled run on a GPU, or else the newest run that is not a sweep. base: the
    newest earlier run with common cases, preferably of the same suite.
    """
    with database.session() as session:
        suites = {run.suite for run in by_uuid.values()}
        suite = suites.pop() if len(suites) == 1 else None
        latest = default_runs(session, suite=suite)
        heads = [run.uuid for run in latest.values() if run.uuid in by_uuid]
        newest = [uuid for uuid, run in by_uuid.items() if run.trigger != SWEEP] or list(by_uuid)
        head = max(heads, key=lambda uuid: by_uuid[uuid].created_at, default=newest[0])
        older = [u for u, run in by_uuid.items() if u != head]
        older.sort(key=lambda u: by_uuid[u].created_at > by_uuid[head].created_at)
        older.sort(key=lambda u: by_uuid[u].suite != by_uuid[head].suite)
        sharing = queries.first_run_sharing_cases(session, head, older)
    return sharing or older[0], head


def _pairs(base: Sequence[ResultRow], head: Sequence[ResultRow], noise: StoredNoise) -> list[Pair]:
    """Compare the cases of two sides, without probes."""
    first, second = ([r for r in side if not is_probe(r.kernel)] for side in (base, head))
    return pairs_of_runs(first, second, noise)


def _two_commits(controls: Controls, database: Database, suites: Sequence[str]) -> _Compared | None:
    prefixes = [p for side in ("base", "head") for p in st.query_params.get_all(f"{side}-commits")]
    with database.session() as session:
        project = current_project(session)
        commits = queries.recent_commits(
            session, limit=_MAX_COMMITS, prefixes=prefixes, project=project
        )
    if not commits:
        show_empty_database(database)
        return None
    if len(commits) < 2:
        st.info(f"One commit is stored. Compare two, interleaved A/B: {gate_command(database)}")
        return None
    by_sha = {row.sha: row for row in commits}
    order = list(by_sha)
    sides = [
        controls.select(
            st.container(), f"{side}-commits", side.capitalize(), order, default,
            format_func=lambda sha: _commit_title(by_sha[sha]), to_url=lambda sha: sha[:10],
            always_in_url=True,
        )
        for side, default in (("base", order[1]), ("head", order[0]))
    ]  # fmt: skip
    suite = choose_suite(st.sidebar, controls, suites)
    filters = Filters(suites=(suite,)) if suite else Filters()
    with database.session() as session:
        base, head = (
            queries.results_at_commit(session, sha, filters, project=project) for sha in sides
        )
        decisions = queries.decisions_between(session, *sides)
        measured = {r.series_id for r in (*base, *head)}
    noise = stored_noise(database, measured)
    if suite:
        decisions = {series: row for series, row in decisions.items() if series in measured}
    frame = compare_frame(
        _pairs(base, head, noise),
        decisions,
    )
    advice = _interleaved(sides, project, suite or "nightly")
    first, second = (short_commit(sha, dirty=False) for sha in sides)
    return _Compared(frame, first, second, advice, noise)


def _two_kernels(controls: Controls, database: Database, suites: Sequence[str]) -> _Compared | None:
    with database.session() as session:
        project = current_project(session)
        known = [
            s
            for s in queries.series_names(session)
            if s.metric == "time" and s.project == project and s.backend != queries.EXTERNAL_BACKEND
        ]
    labels = sorted({kernel_label(s.kernel, s.variant) for s in known if not is_probe(s.kernel)})
    if not labels:
        show_empty_database(database)
        return None
    if len(labels) < 2:
        st.info(f"{as_text(labels[0])} is the only kernel here: measure another one.")
        return None
    first = BASELINE if BASELINE in labels else labels[0]
    second = next(label for label in labels if label != first)
    base, head = (
        controls.select(
            st.container(),
            f"{side}-kernels",
            side.capitalize(),
            labels,
            default,
            always_in_url=True,
        )
        for side, default in (("base", first), ("head", second))
    )
    suite = choose_suite(st.sidebar, controls, suites)
    names = tuple({_kernel_and_variant(label)[0] for label in (base, head)})
    sweeps = () if suite or choose_sweeps(st.sidebar, controls) else (SWEEP,)
    in_suites = (suite,) if suite else ()
    filters = Filters(kernels=names, suites=in_suites, without_triggers=sweeps, projects=(project,))
    with database.session() as session:
        results = newest_of_cases(queries.latest_results(session, filters))
        runs = tuple(sorted({r.run for r in results if kernel_label(r.kernel, r.variant) == head}))
        in_runs = Filters(runs=runs, kernels=names)
        baselines = queries.results_table(session, in_runs) if runs else []
    noise = stored_noise(database, {r.series_id for r in results})
    frame = compare_frame(pairs_of_labels(results, base, head, noise, baselines))
    advice = ["compare", base, head, "--suite", suite or "nightly"]
    return _Compared(frame, base, head, as_code(command_lines.command(*advice)), noise)


def _kernel_and_variant(label: str) -> tuple[str, str]:
    """Split any stored label: those of imported records may not be valid kernel labels."""
    kernel, _, variant = label.partition("[")
    return kernel, variant.removesuffix("]")


_SIDES = {_RUNS: _two_runs, _COMMITS: _two_commits, _KERNELS: _two_kernels}


def _commit_title(row: CommitRow) -> str:
    parts = (short_commit(row.sha, dirty=False), row.subject, row.author)
    return " · ".join(part for part in parts if part)


def _show(controls: Controls, database: Database, compared: _Compared) -> None:
    if compared.frame.empty:
        how = f" Measure by interleaved A/B: {compared.advice}" if compared.advice else ""
        st.info(
            f"Nothing is stored of both {as_text(compared.base)} and {as_text(compared.head)}.{how}"
        )
        return
    passing = controls.narrow(compared.frame, _FILTERS)
    places = places_of_frame(compared.frame)
    models, _ = models_and_layers(places)
    model = controls.multiselect(st.sidebar, "model", "Model", models)
    frame = narrowed_to(passing, places, model, ())
    if frame.empty:
        st.info("No case passes all filters: remove one, or clear them all.")
        return
    _show_summary(frame, compared)
    with database.session() as session:
        kernels = queries.kernel_names(session)
    styles = kernel_styles(kernels, {_kernel_and_variant(label) for label in frame["label"]})
    if frame["ratio"].notna().any():
        show_means(mean_rows(frame, compared.noise))
    if (frame["base_us"].notna() & frame["head_us"].notna()).any():
        st.header("Times", anchor=False)
        draw_chart(charts.times(frame, styles, compared.base, compared.head), key="times")
    changed = frame[frame["ratio"].notna()].head(_MAX_CHANGES)
    if not changed.empty:
        st.header("Changes", anchor=False)
        if len(changed) < int(frame["ratio"].notna().sum()):
            st.caption(f"The {len(changed)} worst; the table has them all.")
        draw_chart(charts.changes(changed, styles), key="changes")
    show_rows(frame)


def _show_summary(frame: pd.DataFrame, compared: _Compared) -> None:
    counts = frame["verdict"].value_counts()
    words = ", ".join(f"**{count}** {as_text(str(verdict))}" for verdict, count in counts.items())
    st.markdown(f"{as_text(compared.head)} against {as_text(compared.base)}: {words}")
    compared_rows = frame[frame["ratio"].notna()]
    apart = int((compared_rows["evidence"] == APART).sum())
    if compared_rows.empty and compared.advice:
        st.info(
            f"No case has a result on both sides. Measure by interleaved A/B: {compared.advice}"
        )
    if apart:
        how = f"To be sure, measure by interleaved A/B on one GPU: {compared.advice}"
        st.warning(
            f"{apart} of {len(compared_rows)} rows {_APART} {_noise_in_words(frame, compared)} "
            + (how if compared.advice else "Both are of one commit, so the code is not the cause."),
            icon=":material/rule:",
        )
    if ONE_RUN in set(compared_rows["evidence"]):
        st.caption(
            "Rows of one run: both sides were measured in the same run, without run-to-run noise."
        )
    if INTERLEAVED in set(frame["evidence"]):
        st.caption(
            "Where the two commits were measured by interleaved A/B on one GPU, that verdict "
            "stands, with one-sided 99 % bounds."
        )


def _noise_in_words(frame: pd.DataFrame, compared: _Compared) -> str:
    series = frame.loc[frame["evidence"] == APART, "head_series"]
    sources = sorted({compared.noise.source(int(series_id)) for series_id in series})
    return f"Source of the noise: {'; '.join(sources)}."
