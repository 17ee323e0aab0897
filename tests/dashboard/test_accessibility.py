"""Pages of the demo by axe-core, in both themes and at the widths of phones and of wide screens."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import IN_A_BROWSER, ROOT, dashboard_on, show_in, wait_for
from page_content import rows_of_file

from flexq_bench.cli.demo import demo_database

pytestmark = [*IN_A_BROWSER, pytest.mark.slow]

WIDTHS = (360, 768, 1280, 1920)
PAGES = sorted(path.parent.name for path in (ROOT / "dashboard" / "views").glob("*/page.py"))
# Views of pages that show something else than the page alone.
VIEWS = (
    *("leaderboard?class=6", "compare?kind=commits", "compare?kind=kernels"),
    *("kernels?view=heat+map", "history?kernel=flexq", "sweep", "paper?table=flexq%2Ftable-6"),
)
RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then(
  (results) => done(results.violations.flatMap((rule) => rule.nodes.map(
    (node) => `${rule.impact}: ${rule.id}: ${node.target}: ${node.html.slice(0, 160)}`))),
  (error) => done([String(error)]),
);
"""


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core, which npm installed."""
    command = ("npm", "root", "--global")
    folder = shutil.which("npm") and subprocess.run(command, capture_output=True, text=True).stdout
    script = Path(str(folder).strip()) / "axe-core" / "axe.min.js"
    if not script.is_file():
        pytest.skip("no axe-core here: npm install --global axe-core")
    return script.read_text("utf-8")


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[str, str]]:
    """The dashboard on the demo, and the address of one measurement of it."""
    with demo_database() as path, dashboard_on(path) as url:
        ((uuid,),) = rows_of_file(path, "SELECT uuid FROM measurement WHERE accepted LIMIT 1")
        yield url, f"measurement?uuid={uuid}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_violation_at_any_width(
    demo: tuple[str, str], browser: Any, axe: str, theme: str
) -> None:
    url, measurement = demo
    show_in(browser, theme)
    browser.set_script_timeout(120)
    wrong = []
    for page in (*PAGES, *VIEWS, measurement):
        resize(browser, WIDTHS[0])
        browser.get(url if page == "home" else f"{url}/{page}")
        wait_for(lambda: is_settled(browser), f"{page} never settles", seconds=120)
        browser.execute_script(axe)
        for width in WIDTHS:
            resize(browser, width)
            time.sleep(0.5)  # charts are drawn again
            found = browser.execute_async_script(RUN)
            if browser.execute_script("return document.body.scrollWidth > innerWidth"):
                found.append("the page scrolls sideways")
            wrong += [f"{page}, {width} px: {words}" for words in found]

    assert wrong == []


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def is_settled(browser: Any) -> bool:
    busy = "[data-testid=stStatusWidget], [data-testid=stSkeleton], [data-stale=true]"
    find = browser.find_elements
    return bool(find("css selector", "h1")) and not find("css selector", busy)
