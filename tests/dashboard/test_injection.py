"""Whatever stored text says, pages show it as text, and what they export runs nothing."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pytest
from made_models import a_decode, a_gate, a_score
from made_results import a_record, a_run
from page_content import tables
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.shared.results_frame import as_csv, results_frame
from flexq_bench.dashboard.shared.spreadsheet import as_cell, harmless
from flexq_bench.db import queries
from flexq_bench.db.decisions import set_alert_state
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.requests import RequestInfo, add_request
from flexq_bench.fleet.requests import LIMITS

HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>"
MARKDOWN = "[click](javascript:alert(1)) **bold** $x^2$ :smile: `code`"
FORMULAS = ('=HYPERLINK("http://evil.example")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1")
NEARLY_NUMBERS = (
    "+1.2 %+A1",
    "-3.4 us\n=1",
    "+1 cmd",
    "-1:2",
    "+1..2",
    "-٣",
    "+A1",
    "-",
    "+1.2 %*2",
    "+5.19%, 99 % bounds +5.07% and +5.31%+A1",
)
NOW = datetime(2026, 1, 3, tzinfo=UTC)
BOTH = f"{HTML} {MARKDOWN}"
EVIL = a_record(kernel=HTML, variant=MARKDOWN, model=HTML, layer=BOTH)


@pytest.mark.parametrize("text", FORMULAS + NEARLY_NUMBERS)
def test_a_formula_becomes_text(text):
    assert as_cell(text) == f"'{text}"


@pytest.mark.parametrize(
    "text",
    [
        "flexq-w6a6",
        "",
        "2 = 2",
        "+5.13 %",
        "+1.2 %",
        "-3.4 us",
        "-3.4 µs",
        "+7",
        "-0.20 % to +0.10 %",
        "-2.00 points (-3.00 to -1.00)",
        "+5.19%, 99 % bounds +5.07% and +5.31%",
        "–",
    ],
)
def test_other_text_and_our_percentages_stay_as_they_are(text):
    assert as_cell(text) == text


def test_numbers_times_and_gaps_are_left_alone():
    frame = pd.DataFrame({"a": [-1.5, 2.0], "b": [pd.Timestamp(NOW)] * 2, "c": ["=1", None]})

    made = harmless(frame)

    assert made["a"].tolist() == [-1.5, 2.0]
    assert made["b"].equals(frame["b"])
    assert made["c"].iloc[0] == "\u200b=1", "begins with no formula, and shows none of that"
    assert pd.isna(made["c"].iloc[1])


@pytest.mark.parametrize("formula", FORMULAS[:4])
def test_a_downloaded_file_holds_no_formula(store: Any, formula: str):
    store.add(a_record(kernel=formula, model=formula, layer=formula, detail=formula))
    with open_database(str(store.path)) as database, database.session() as session:
        frame = results_frame(queries.results_table(session), "cublaslt-w8a8")

    (row,) = csv.DictReader(io.StringIO(as_csv(frame)))

    assert {row[name] for name in ("kernel", "label", "model", "layer", "detail")} == {
        f"'{formula}"
    }
    assert float(row["median_us"]) == 8.0


@pytest.fixture
def evil(store: Any, compared: Any, commits: Any) -> Any:
    """An alert whose commits, note and kernel's results mean harm."""
    named = {
        sha: dataclasses.replace(info, subject=f"{FORMULAS[0]} {HTML} {MARKDOWN}", author=HTML)
        for sha, info in commits.items()
    }
    (alert,) = store.judge(compared("flexq-w6a6", 1.05), commits=named).opened
    with store.session() as session:
        set_alert_state(session, alert, "acknowledged", person=FORMULAS[0], note=BOTH, at=NOW)
    store.add(
        EVIL,
        a_record(m=8, kernel=HTML, status="failed", detail=FORMULAS[0] + HTML, median_us=None),
        a_record(a_run(HTML, suite=MARKDOWN), kernel=HTML, stage=MARKDOWN, cache=HTML),
        a_record(
            a_run("unit", suite=MARKDOWN),
            kernel=HTML,
            metric=HTML,
            unit=HTML,
            commit=CommitInfo(f"pkg-{HTML}", None, None, dirty=False),
        ),
        a_record(a_run(HTML, suite=MARKDOWN), kernel=HTML, stage="gemm", cache=HTML, gpu=BOTH),
    )
    harm = {"model": HTML, "task": HTML}
    store.add(
        *(a_score(scheme, **harm) for scheme in ("fp16", MARKDOWN)),
        a_gate(FORMULAS[0], model=HTML, base=FORMULAS[0], policy=HTML),
        a_decode(MARKDOWN, model=HTML, weights=MARKDOWN),
    )
    with store.session() as session:
        content = {"kernels": [HTML], "m": [1], "shapes": [], "stages": [], "caches": []}
        info = RequestInfo(HTML, "sweep", content, BOTH, MARKDOWN, 1, None, NOW)
        add_request(session, info, limits=LIMITS)
    return store


def columns_of(app: AppTest) -> Iterator[dict[str, Any]]:
    """Return the column settings of a page's tables."""
    for table in app.dataframe:
        yield from json.loads(table.proto.columns or "{}").values()


def without_code(markdown: str) -> str:
    """Markdown without what it shows as code, as it is."""
    return re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown)


def texts(value: Any) -> Iterator[str]:
    """Yield all texts in a chart, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("history", {"kernel": HTML, "metric": HTML}),
        *((name, {}) for name in ("home", "alert", "history", "compare", "sweep", "fleet")),
        *((name, {"baseline": HTML, "gpu": BOTH}) for name in ("results", "kernels")),
        ("accuracy", {"model": HTML}),
        ("decode", {"model": HTML}),
        ("measurement", {"uuid": EVIL.uuid}),
        ("measurement", {"uuid": HTML}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_no_page_takes_stored_text_for_markup(
    evil: Any, open_page: Callable[..., AppTest], page: str, link: dict[str, str]
) -> None:
    app = open_page(page, **link)

    parts: list[Any] = [*app.markdown, *app.caption, *app.title, *app.header, *app.subheader]
    parts += [*app.info, *app.warning, *app.error, *app.success]
    for part in parts:
        assert not getattr(part.proto, "allow_html", False)
    # Streamlit takes these for Markdown too: the words beside round buttons, and hints.
    markdown = [part.value for part in parts]
    markdown += [option for buttons in app.radio for option in buttons.options]
    markdown += [column["help"] for column in columns_of(app) if column.get("help")]
    for text in map(without_code, markdown):
        assert "<script" not in text.replace("\\<", "")
        assert "[click](" not in text
        assert "**bold**" not in text
    for chart in app.get("plotly_chart"):
        assert [
            t for t in texts(json.loads(chart.proto.spec)) if "<script" in t or "<img" in t
        ] == []
    cells = [
        cell
        for table in tables(app)
        for column in table.columns
        for cell in table[column]
        if isinstance(cell, str)
    ]
    names = [str(name) for table in tables(app) for name in table.columns]
    assert cells or page == "sweep" or link.get("uuid") == HTML
    assert [cell for cell in (*cells, *names) if cell.startswith("=")] == []
