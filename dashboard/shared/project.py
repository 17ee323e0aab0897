"""The project that pages show, with its branch and database; in the sidebar of every page."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath
from urllib.parse import urlsplit

import streamlit as st

from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.dashboard.shared.links import ALERT, PROJECT
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session

_CONTROLS = "app"


def project_title(project: str) -> str:
    """Return the name of a project; of this repository, whose commits have none, that of FlexQ."""
    return project or "FlexQ Bench"


def current_project(session: Session) -> str:
    """Return the selected project; by default the main one."""
    selected = st.session_state.get(f"{_CONTROLS}.{PROJECT}")
    return queries.main_project(session) if selected is None else str(selected)


def show_place(database: Database) -> None:
    """Show project, main branch and database; several projects can be selected from."""
    with database.session() as session:
        names = queries.project_names(session)
        main = queries.main_project(session)
        _select_project_of_alert(session, names)
    default = main if main in names or not names else names[0]
    project = default
    if names:
        controls = Controls(_CONTROLS)
        project = controls.select(
            st.sidebar, PROJECT, "Project", names, default, format_func=project_title
        )
        controls.warn_of_ignored(st.sidebar, "Not stored, so ignored")
    with database.session() as session:
        branch = next(iter(queries.branch_names(session, project)), None)
    parts = [
        f"Project **{as_text(project_title(project))}**" if names else "No project has a result",
        "no branch is known" if branch is None else f"branch **{as_text(branch or '(main)')}**",
        f"database **{as_text(_short(database))}**",
    ]
    st.sidebar.markdown(" · ".join(parts), help=as_text(database.url))


def _select_project_of_alert(session: Session, names: Collection[str]) -> None:
    """Select the project of the alert in the URL: what a page says of its project is of that."""
    number = st.query_params.get(ALERT)
    if number is None or len(names) < 2:
        return
    for row in queries.alerts(session):
        if str(row.id) == number and row.bad.project in names:
            st.session_state[f"{_CONTROLS}.{PROJECT}"] = row.bad.project


def _short(database: Database) -> str:
    """Return the file's name, or host and name on a server."""
    if database.path is not None:
        return PurePath(database.path).name
    parts = urlsplit(database.url)
    return f"{parts.hostname or ''}{parts.path}"
