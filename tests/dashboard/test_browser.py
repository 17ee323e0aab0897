"""The app in a real browser, over the example results."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import IN_A_BROWSER, POINT, ROOT, THEMES, body, dashboard_on, errors, look, wait_for

from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.exchange import import_file
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night

PARTS = ("llama-7b", "others")  # of Figure 10, the second one measured last
pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def examples(
    tmp_path_factory: pytest.TempPathFactory, compared: Any, commits: Any
) -> Iterator[str]:
    """The dashboard on the example results, and a night that opened an alert."""
    path = tmp_path_factory.mktemp("dashboard") / "examples.sqlite"
    with open_database(str(path)) as database:
        for file in (ROOT / "examples" / "h200" / f"paper-fig10-{part}.parquet" for part in PARTS):
            with database.session() as session:
                import_file(session, file)
        _judge_a_night(database, compared, commits)
    with dashboard_on(path) as url:
        yield url


def _judge_a_night(database: Database, compared: Any, commits: dict[str, CommitInfo]) -> None:
    """Store an alert about a commit whose subject is an attack."""
    evil = {
        sha: replace(info, subject=f"<img src=x onerror=alert(1)> **{info.subject}**")
        for sha, info in commits.items()
    }
    slow = [
        compared(kernel, 1.05, base=3, head=6, shape=(m, 4096, 4096))
        for kernel in ("flexq-w6a6", "flexq-w6a8")
        for m in (1, 4)
    ]
    machine = Machine("cpu", DeviceInfo("GPU-1", "NVIDIA H200", "cuda"))
    with database.session() as session:
        record_night(session, slow, machine, evil, alerting=True)


@pytest.mark.parametrize("theme", THEMES)
def test_results_are_drawn_without_an_error(examples: str, browser: Any, theme: str) -> None:
    url = f"{examples}/results?chart-m=8"

    text = look(browser, url, "[data-testid=stDataFrame]", theme=theme, name=f"results-{theme}")

    background = browser.find_element("css selector", ".stApp").value_of_css_property(
        "background-color"
    )
    is_dark = int(background.partition("(")[2].partition(",")[0]) < 128
    assert is_dark == (theme == "dark"), background
    assert len(browser.find_elements("css selector", ".js-plotly-plot")) == 2
    assert browser.find_elements("css selector", POINT)
    assert "Speed-up over cublaslt-w8a8" in text
    assert "M = 8" in text
    assert " JST" in text


@pytest.mark.slow
def test_the_table_is_saved_as_the_link_narrows_it(
    examples: str, browser: Any, tmp_path: Path
) -> None:
    link = f"{examples}/results?kernel=flexq-imma-w6a6&m=4"
    look(browser, link, "[data-testid=stDownloadButton]", name="results-narrowed")

    browser.find_element("css selector", "[data-testid=stDownloadButton] button").click()

    file = tmp_path / "flexq-bench-results.csv"
    wait_for(file.exists, "no file was saved")
    with file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert {(row["kernel"], row["m"]) for row in rows} == {("flexq-imma-w6a6", "4")}
    assert all(float(row["speedup_low"]) <= float(row["speedup"]) for row in rows)


@pytest.mark.slow
def test_home_leads_to_an_alert_that_people_can_close(examples: str, browser: Any) -> None:
    text = look(browser, f"{examples}/", "[data-testid=stPageLink]", name="home")
    assert "Alert 1: flexq" in text
    assert "**Change 6**" in text  # text, neither bold nor an image
    assert not browser.find_elements("css selector", "img[src=x]")

    browser.find_element("css selector", "[data-testid=stPageLink] a[href*='alert=']").click()
    wait_for(lambda: browser.find_elements("css selector", POINT), "no evidence is drawn")
    assert "alert=1" in browser.current_url
    text = look(browser, browser.current_url, POINT, name="alert")
    assert "bisect" in text
    assert not browser.find_elements("css selector", "img[src=x]")

    browser.find_element("css selector", "textarea").send_keys("<b>looking</b> at it")
    browser.find_element(
        "css selector", "[data-testid=stForm] [data-testid=stTextInput] input"
    ).send_keys("Ada")
    wait_for(
        lambda: browser.find_element("css selector", "textarea").get_attribute("value"), "no note"
    )
    browser.find_element("css selector", "[data-testid=stFormSubmitButton] button").click()
    wait_for(
        lambda: "Saved: alert 1" in body(browser),
        "the note is not saved",
    )
    assert "Note: <b>looking</b> at it" in body(browser)
    assert errors(browser) == []
