"""Limits of a user of the dashboard: no reading of files, no other writes, no flood of requests."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from browsing import (
    IN_A_BROWSER,
    ROOT,
    body,
    click,
    dashboard_on,
    errors,
    fill_sweep_form,
    open_sweep_form,
    wait_for,
)
from sqlalchemy import func, select

from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file
from flexq_bench.db.fleet import WorkerInfo, register_worker
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.tables import Base
from flexq_bench.fleet.requests import LIMITS

pytestmark = [*IN_A_BROWSER, pytest.mark.slow, pytest.mark.timeout(600)]
SECRET = "5ec3e7c0ffee5ec3"
OUTSIDE = (
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "media/..%2f..%2fetc%2fpasswd",
    "static/../../../../etc/passwd",
    "app/static/%2e%2e/%2e%2e/etc/passwd",
)
MAY_GROW = {"alert", "alert_event", "request"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with results and a worker that is alive for longer than these tests."""
    file = tmp_path_factory.mktemp("rights") / "flexq.sqlite"
    with open_database(str(file)) as database, database.session() as session:
        import_file(session, next((ROOT / "examples" / "h200").glob("*.parquet")))
        device = DeviceInfo("CPU-1", "a CPU", "cpu")
        later = datetime.now(UTC) + timedelta(hours=1)
        register_worker(session, WorkerInfo("w1", "node7", 1, device, {}), at=later)
    return file


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with dashboard_on(path) as address:
        yield address


def rows(path: Path) -> dict[str, int]:
    with open_database(str(path), read_only=True) as database, database.session() as session:
        return {
            name: session.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
        }


def test_no_field_reads_a_file(browser: Any, url: str, path: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"8\nPOSTGRES_PASSWORD={SECRET}\n")
    before = rows(path)
    open_sweep_form(browser, url, name="sweep-rights")
    for field in ("n", "k", "m"):
        fill_sweep_form(browser, **{field: f"@{tmp_path / '.env'}"})
        click(browser, "Start")
        wait_for(
            lambda: "is not a size or a range" in body(browser), f"{field}: {body(browser)[-600:]}"
        )
        assert SECRET[:6] not in browser.page_source
        assert "PASSWORD" not in browser.page_source
        open_sweep_form(browser, url, name="sweep-rights")

    assert rows(path) == before


def test_addresses_below_the_app_lead_to_no_file(url: str) -> None:
    import urllib.error
    import urllib.request

    for place in OUTSIDE:
        try:
            with urllib.request.urlopen(f"{url}/{place}", timeout=10) as answer:
                content = answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            content = error.read().decode(errors="replace")
        assert "root:" not in content, place


def test_only_requests_grow_up_to_the_limit(browser: Any, url: str, path: Path) -> None:
    before = rows(path)
    for number in range(LIMITS.requests + 1):
        open_sweep_form(browser, url, name="sweep-rights")
        fill_sweep_form(browser, m=str(number + 1))
        click(browser, "Start")
        wait_for(
            lambda: "Queued as request" in body(browser) or "open requests" in body(browser),
            body(browser)[-600:],
        )
    text, after = body(browser), rows(path)

    assert f"Ada has {LIMITS.requests} open requests" in text
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown == {"request": LIMITS.requests}
    assert set(grown) <= MAY_GROW
    assert errors(browser) == []


def test_oversized_request_is_refused_before_it_is_built(
    browser: Any, url: str, path: Path
) -> None:
    before = rows(path)
    open_sweep_form(browser, url, name="sweep-rights")
    fill_sweep_form(browser, n="1:9000", k="1:9000", person="Bob")
    click(browser, "Start")
    wait_for(lambda: "81,000,000" in body(browser) or "cases" in body(browser), "nothing is said")

    assert rows(path) == before
