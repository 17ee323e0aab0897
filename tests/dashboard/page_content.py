"""Contents of a page that a test has run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from sqlalchemy import text
from streamlit.testing.v1 import AppTest

from flexq_bench.db.engine import open_database

OpenPage = Callable[..., AppTest]


def rows_of_file(path: Path, query: str) -> list[Any]:
    """Return the rows of an SQL query of a database's file."""
    with open_database(str(path), read_only=True) as database, database.session() as session:
        return list(session.execute(text(query)))


def markdown(app: AppTest) -> str:
    """Return the page's text outside of its tables and charts, as Markdown."""
    parts: list[Any] = [
        *(*app.title, *app.header, *app.markdown, *app.caption),
        *(*app.info, *app.warning, *app.error, *app.success),
    ]
    return "\n".join(str(part.value) for part in parts)


def words(app: AppTest) -> str:
    """Return the text as a viewer reads it: without the escapes of Markdown."""
    return markdown(app).replace("\\", "")


def table(app: AppTest, *, of: str) -> pd.DataFrame:
    """The one table that has this column."""
    (frame,) = [shown.value for shown in app.dataframe if of in shown.value.columns]
    return frame


def table_rows(app: AppTest, *, of: str) -> list[dict[Any, Any]]:
    """The rows of the one table that has this column."""
    return table(app, of=of).to_dict("records")


def charts(app: AppTest) -> list[dict[str, Any]]:
    """Plotly's specification of each chart, from top to bottom."""
    return [json.loads(drawn.proto.spec) for drawn in app.get("plotly_chart")]


def chart(app: AppTest) -> dict[str, Any]:
    """The only chart."""
    (drawn,) = charts(app)
    return drawn


def charts_by_axis(app: AppTest) -> dict[str, dict[str, Any]]:
    """Charts by the title of their y axis."""
    return {spec["layout"]["yaxis"]["title"]["text"]: spec for spec in charts(app)}
