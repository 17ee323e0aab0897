"""The app below a path, behind a proxy that authenticates, in a real browser."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from browsing import IN_A_BROWSER, POINT, ROOT, dashboard_on, errors, look, wait_for
from proxying import NAME, PASSWORD, Proxy, proxied

from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file
from flexq_bench.db.records import DeviceInfo
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night

pytestmark = [*IN_A_BROWSER, pytest.mark.slow]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, compared: Any, commits: Any) -> Iterator[Any]:
    """The proxy in front of a dashboard with an alert, below `bench`."""
    path = tmp_path_factory.mktemp("dashboard") / "proxied.sqlite"
    with open_database(str(path)) as database, database.session() as session:
        import_file(session, ROOT / "examples" / "h200" / "smoke.parquet")
        machine = Machine("cpu", DeviceInfo("GPU-1", "NVIDIA H200", "cuda"))
        slow = compared("flexq-w6a6", 1.05, base=3, head=6, shape=(1, 4096, 4096))
        record_night(session, [slow], machine, commits, alerting=True)
    with dashboard_on(path, below="bench") as url:
        port = urlsplit(url).port
        assert port is not None
        with proxied(port, "bench") as started:
            yield started


def sign_in(browser: Any, proxy: Proxy) -> None:
    """Send name and password once; the browser repeats them in later requests."""
    with_password = proxy.url.replace("http://", f"http://{NAME}:{PASSWORD}@")
    browser.get(f"{with_password}/favicon.png")


def test_nothing_is_shown_without_the_password(proxy: Proxy) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{proxy.url}/")


def test_pages_and_their_links_stay_below_the_path(proxy: Proxy, browser: Any) -> None:
    sign_in(browser, proxy)
    text = look(browser, f"{proxy.url}/", "[data-testid=stPageLink]", name="proxy-home")
    assert "Alert 1: flexq" in text
    assert proxy.websockets == ["/bench/_stcore/stream"]

    browser.find_element("css selector", "[data-testid=stPageLink] a[href*='alert=']").click()
    wait_for(lambda: browser.current_url == f"{proxy.url}/alert?alert=1", "no link leads to it")
    wait_for(lambda: browser.find_elements("css selector", POINT), "no evidence is drawn")

    links = browser.find_elements("css selector", "[data-testid=stSidebarNav] a")
    hrefs = [link.get_attribute("href") for link in links]
    assert all(href.startswith(proxy.url) for href in hrefs), hrefs
    links[hrefs.index(f"{proxy.url}/leaderboard")].click()
    to_page = f"{proxy.url}/leaderboard"
    wait_for(lambda: browser.current_url.startswith(to_page), "no link leads to the leaderboard")

    look(browser, f"{proxy.url}/history", POINT, name="proxy-history")  # a link that somebody sent
    assert proxy.outside == []
    assert errors(browser) == []
