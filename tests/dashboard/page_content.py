"""Contents of a page that a test has run."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
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


_TAGS = ("div", "table", "thead", "tbody", "tr", "th", "td", "a", "img")


class _StaticTable(HTMLParser):
    """Rows of a static table. Of a cell with a link or an image the value is its address."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _TAGS, "stored text is markup"
        address = dict(attrs).get({"a": "href", "img": "src"}.get(tag, ""))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(None)
        elif address is not None:
            self.rows[-1][-1] = address

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and self.rows[-1][-1] is None:
            self.rows[-1][-1] = data


def _as_number(text: Any) -> Any:
    """Return the number of a cell such as `+1.23 %`; other texts as they are."""
    try:
        return pd.to_numeric(text.removesuffix(" %"))
    except (ValueError, AttributeError):
        return text


def tables(app: AppTest) -> list[pd.DataFrame]:
    """All tables, static ones first."""
    frames = []
    for shown in app.get("html"):
        if 'class="static-table"' in shown.proto.body:
            parser = _StaticTable()
            parser.feed(shown.proto.body)
            rows = [[_as_number(cell) for cell in row] for row in parser.rows[1:]]
            frames.append(pd.DataFrame(rows, columns=parser.rows[0]))
    return [*frames, *(shown.value for shown in app.dataframe)]


def table(app: AppTest, *, of: str) -> pd.DataFrame:
    """The one table that has this column."""
    (frame,) = [shown for shown in tables(app) if of in shown.columns]
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
