"""Kernels, Compare, Paper and Sweep in a real browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import (
    IN_A_BROWSER,
    POINT,
    ROOT,
    THEMES,
    body,
    click,
    dashboard_on,
    errors,
    fill_sweep_form,
    look,
    open_sweep_form,
    wait_for,
)

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file

pytestmark = [*IN_A_BROWSER, pytest.mark.slow]


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard on every example of an H200, with what papers state."""
    path = tmp_path_factory.mktemp("dashboard") / "gallery.sqlite"
    with open_database(str(path)) as database:
        for file in sorted((ROOT / "examples" / "h200").glob("*.parquet")):
            with database.session() as session:
                import_file(session, file)
    with dashboard_on(path) as url:
        yield url


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("link", "until", "caption"),
    [
        ("kernels", POINT, "floors of these shapes"),
        ("kernels?view=heat+map", ".js-plotly-plot .heatmaplayer", "M = 8"),
        ("kernels?view=ablation", ".js-plotly-plot .barlayer .point", "vanilla"),
        (
            "kernels?view=gemm+against+linear&m=8",
            POINT,
            "including activation quantization / GEMM only (×)",
        ),
        (
            "compare?kind=kernels&base-kernels=cublaslt-w8a8&head-kernels=flexq",
            POINT,
            "Geometric means",
        ),
        ("paper", POINT, "published"),
    ],
)
def test_pages_are_drawn_without_an_error(
    gallery: str, browser: Any, link: str, until: str, caption: str, theme: str
) -> None:
    name = "-".join(link.replace("=", "?").replace("&", "?").split("?")[:3]).replace("+", "-")

    text = look(browser, f"{gallery}/{link}", until, theme=theme, name=f"{name}-{theme}")

    assert caption in text


def test_sweep_started_on_the_page_is_measured_by_worker(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "sweep.sqlite"
    open_database(str(path)).close()
    command = [sys.executable, "-m", "flexq_bench.cli", "worker", "--backend", "cpu"]
    with dashboard_on(path) as url:
        worker = subprocess.Popen(
            [*command, "--poll", "0.2", "--db", str(path)], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        try:
            wait_for(lambda: workers_of(path), "no worker says that it is alive")
            open_sweep_form(browser, url, name="sweep-form")
            fill_sweep_form(browser, m="1,4")
            click(browser, "Start")
            wait_for(lambda: "Queued as request" in body(browser), "nothing was queued")
            wait_for(lambda: "done · 7 of 7 results" in body(browser), "it is not measured", 120)
            link = browser.current_url
            text = look(browser, link, POINT, name="sweep-done")
        finally:
            worker.terminate()
            worker.wait(timeout=20)
        assert "M (tokens), log scale" in text
        assert "request=" in link
        assert errors(browser) == []
        text = look(browser, f"{url}/sweep", "[data-testid=stAlert]", name="sweep-no-worker")
        assert "No worker is alive" in text


def workers_of(path: Path) -> list[Any]:
    with open_database(str(path), read_only=True) as database, database.session() as session:
        return queries.workers(session, live=True)
