"""Three questions that the demo's pages answer, with the numbers that its database has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, dashboard_on, settled_text, wait_for
from page_content import OpenPage, rows_of_file, table, words

from flexq_bench.cli.demo import demo_database


@pytest.fixture(scope="module")
def unpacked() -> Iterator[Path]:
    with demo_database() as path:
        yield path


@pytest.fixture
def demo(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's database, as that of the app."""
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(unpacked))
    return unpacked


SEARCH = "[data-testid=stSidebar] input[aria-label=Search]"
ALERTS = """
SELECT alert.id, max(decision.log_ratio), "commit".subject, "commit".author FROM alert
JOIN decision ON decision.alert_id = alert.id JOIN "commit" ON alert.bad_commit_id = "commit".id
WHERE alert.state IN ('new', 'acknowledged') GROUP BY alert.id
"""
FASTEST = """
SELECT series.kernel, measurement.median_us, max(measurement.created_at)
FROM measurement JOIN series ON measurement.series_id = series.id
WHERE series.gpu = 'NVIDIA H200' AND m = 8 AND n = 5120 AND k = 13824
AND stage = 'gemm' AND cache = 'cold' AND metric = 'time' AND accepted
AND variant = '' AND weight_bits >= 6 AND act_bits >= 6 AND kernel NOT LIKE 'read-%'
GROUP BY series.id ORDER BY measurement.median_us
"""
SHIPPED = """
SELECT accuracy_gate.scheme, min(token_ms) FROM accuracy_gate JOIN decode_result
ON decode_result.scheme = accuracy_gate.scheme AND decode_result.model = accuracy_gate.model
WHERE accuracy_gate.model = 'tiny-llama' AND verdict = 'pass'
AND accuracy_gate.content_hash IS NOT NULL
"""


def test_home_names_slower_kernel_its_change_and_author(demo: Path, open_home: OpenPage):
    alerts = rows_of_file(demo, ALERTS)
    app = open_home()

    shown = words(app) + "".join(
        link.proto.label.replace("\\", "") for link in app.get("page_link")
    )
    assert alerts
    for number, worst, subject, author in alerts:
        assert f"Alert {number}: " in shown
        if worst is not None:
            assert f"{100 * math.expm1(worst):+.2f} %" in shown
        assert f"{subject} ({author})" in shown


def test_fastest_kernel_of_a_layer_within_a_class(demo: Path, open_leaderboard: OpenPage):
    place = {"gpu": "NVIDIA H200", "model": "llama-2-13b", "layer": "down_proj", "m": "8"}
    app = open_leaderboard(**place, **{"class": "6"})

    newest = rows_of_file(demo, FASTEST)
    shown = table(app, of="rank")
    assert [(r.label, r.median_us) for r in shown.itertuples()] == [tuple(n[:2]) for n in newest]
    assert "(SmolLM2" in words(app)  # the model that the class's loss was measured on


def test_checkpoint_to_ship_for_one_percent(demo: Path, open_ship: OpenPage):
    gates = dict(
        rows_of_file(
            demo,
            "SELECT scheme, verdict FROM accuracy_gate WHERE model = 'tiny-llama' "
            "AND content_hash IS NOT NULL ORDER BY created_at",
        )
    )
    times = dict(
        rows_of_file(
            demo,
            "SELECT scheme, token_ms FROM decode_result WHERE model = 'tiny-llama' "
            "ORDER BY created_at",
        )
    )

    shown = table(open_ship(model="tiny-llama", loss="1.0"), of="rank")

    chosen = [row for row in shown.itertuples() if row.scheme != "fp16"]
    assert chosen
    for row in chosen:
        assert gates[row.scheme] == "pass"
        assert row.token_ms == times[row.scheme]
        assert row.high <= 1.0
    assert [row.token_ms for row in chosen] == sorted(row.token_ms for row in chosen)
    assert "fp16" in shown["scheme"].tolist()


class Visitor:
    """A browser on the demo's first page. clicks: how often it was clicked."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.clicks = browser, 0
        browser.get(url)

    def click(self, css: str, saying: str = "") -> None:
        def matching() -> list[Any]:
            self.look_at_newest_tab()
            found = self.browser.find_elements("css selector", css)
            return [element for element in found if saying in element.text]

        wait_for(matching, f"there is no {css} that says {saying!r}")
        settled_text(self.browser)
        self.browser.execute_script("arguments[0].click()", matching()[0])
        self.clicks += 1

    def sees(self, *words: str) -> None:
        def says_all() -> bool:
            self.look_at_newest_tab()
            text = self.browser.find_element("tag name", "body").text
            return all(word in text for word in words)

        wait_for(says_all, f"the page never says all of {words}")

    def look_at_newest_tab(self) -> None:
        """Streamlit opens links of Markdown in new tabs."""
        self.browser.switch_to.window(self.browser.window_handles[-1])


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
@pytest.mark.timeout(600)
def test_three_questions_are_answered_within_three_clicks(unpacked: Path, browser: Any):
    number, worst, subject, author = rows_of_file(unpacked, ALERTS)[0]
    kernel, time_us, _ = rows_of_file(unpacked, FASTEST)[0]
    scheme, token_ms = rows_of_file(unpacked, SHIPPED)[0]
    with dashboard_on(None) as url:
        slower = Visitor(browser, url)
        slower.sees(f"Alert {number}: ", f"{100 * math.expm1(worst):+.2f} %", subject, author)
        slower.sees("Project FlexQ Bench")
        slower.click("[data-testid=stPageLink] a[href*='alert=']")
        slower.sees("Commits", "Reproduce")

        fastest = Visitor(browser, url)
        wait_for(lambda: browser.find_elements("css selector", SEARCH), "there is no search")
        settled_text(browser)
        field = browser.find_element("css selector", SEARCH)
        field.send_keys("llama-2-13b down_proj m=8 h200\ue007")  # Enter
        fastest.click("[data-testid=stSidebar] a[href*='leaderboard?']")
        fastest.sees("is fastest")
        fastest.click("label", "at least 6 bits")
        fastest.sees(f"{kernel} is fastest: {time_us:.4g} µs", "(SmolLM2")

        shipped = Visitor(browser, url)
        shipped.click("[data-testid=stSidebarNav] a", "Accuracy")
        shipped.sees(f"{scheme}: {token_ms:.3f} ms a token")

    assert max(slower.clicks, fastest.clicks, shipped.clicks) <= 3
