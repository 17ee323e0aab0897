"""Accuracy, Decode, Fleet and Measurement in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from browsing import IN_A_BROWSER, POINT, ROOT, THEMES, dashboard_on, errors, look, wait_for
from made_models import LAYERS, a_decode, a_score, worse
from made_results import COMMIT, H200, a_run

from flexq_bench.db.engine import Session, open_database
from flexq_bench.db.exchange import import_file
from flexq_bench.db.fleet import (
    Beat,
    JobInfo,
    OffsetInfo,
    WorkerInfo,
    add_jobs,
    add_offsets,
    beat,
    register_worker,
)
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.store import add_records, begin_run

pytestmark = [*IN_A_BROWSER, pytest.mark.slow]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard on example results with samples, scores and decodes, and a worker."""
    path = tmp_path_factory.mktemp("dashboard") / "models.sqlite"
    with open_database(str(path)) as database:
        with database.session() as session:
            import_file(session, ROOT / "examples" / "h200" / "paper-fig10-llama-7b.parquet")
            import_file(session, ROOT / "examples" / "cpu" / "gate-tiny-llama.jsonl.gz")
        with database.session() as session:
            _evaluate(session)
            _start_a_worker(session)
    with dashboard_on(path) as url:
        yield url


def _evaluate(session: Session) -> None:
    errors_of_layers = {"values": (0.3, 0.1, 0.01), "value": 0.3, "parameters": {"layers": LAYERS}}
    add_records(
        session,
        [a_score("fp16"), a_score("flexq-w6ax", **worse(0.03)), a_score("w4a4", **worse(0.4)),
         a_score("w4a4", "layer_error", **errors_of_layers)],
    )  # fmt: skip
    add_records(
        session,
        [a_decode(scheme, batch, ms + batch) for scheme, ms in (("fp16", 20), ("flexq-w6ax", 10))
         for batch in (1, 4, 16)],
    )  # fmt: skip


def _start_a_worker(session: Session) -> None:
    now = datetime.now(UTC)
    device = DeviceInfo("GPU-1", H200, "cuda")
    run = a_run("under way", status="running", plan=("a", "b"))
    begin_run(session, run, COMMIT)
    add_jobs(session, run.uuid, [JobInfo(case, expected_s=9.0) for case in run.plan])
    register_worker(session, WorkerInfo("worker-1", "host-1", 1, device, {}), at=now)
    beat(session, [Beat("worker-1", "a", 61.0, 3, 60.0)], until=now + timedelta(hours=1), at=now)
    add_offsets(session, run.uuid, [OffsetInfo(device, 40, 0.01, 0.005, 0.02)], at=now)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("page", "until", "caption"),
    [
        ("accuracy", POINT, "perplexity against fp16 (%)"),
        ("accuracy?model=tiny-llama", POINT, "The newest 100 verdicts of gates"),
        ("decode", POINT, "time of a token (ms, log scale)"),
        ("fleet", POINT, "time against the mean of its kind"),
    ],
)
def test_pages_are_drawn_without_an_error(
    models: str, browser: Any, page: str, until: str, caption: str, theme: str
) -> None:
    name = f"{page.replace('?', '-').replace('=', '-')}-{theme}"

    text = look(browser, f"{models}/{page}", until, theme=theme, name=name)

    assert caption in text


def test_a_point_of_a_history_leads_to_its_samples(models: str, browser: Any) -> None:
    link = f"{models}/history?kernel=flexq-imma-w6a6&layer=o_proj&m=1"
    text = look(browser, link, POINT, name="history-one")
    assert "commit, by ancestry" in text
    assert "time (µs" in text
    point = browser.find_element("css selector", POINT)

    _click(browser, point)

    wait_for(lambda: "measurement?uuid=" in browser.current_url, "no click leads anywhere")
    text = look(browser, browser.current_url, POINT, name="measurement")
    assert len(browser.find_elements("css selector", ".js-plotly-plot")) == 3
    assert "share of the samples (%)" in text
    assert "SM clock (MHz)" in text
    assert errors(browser) == []


def _click(browser: Any, element: Any) -> None:
    """Move there and press, as a hand does: a chart hears of no other click."""
    box = browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center'});"
        "const b = arguments[0].getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]",
        element,
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        event = {"type": kind, "x": box[0], "y": box[1]}
        if kind != "mouseMoved":
            event |= {"button": "left", "clickCount": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)
