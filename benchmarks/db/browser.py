"""How soon a page shows what it is about, and how much memory the app takes with several viewers.

Starts the dashboard, opens each page in headless Chromium and takes the time from the navigation to
its first chart or table, over repetitions; then opens that many viewers at once, each on another
page, and sums the memory (PSS) of the app's processes. Prints what docs/dashboard.md quotes:

    python benchmarks/db/browser.py large.sqlite
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pages import VIEWS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))
from browsing import dashboard_on, headless

View = tuple[str, dict[str, str | list[str]]]
MEANINGFUL = "[data-testid=stDataFrame] canvas, .js-plotly-plot .trace, .js-plotly-plot .hm"
_PATIENCE_S = 300  # several browsers on two cores that others use, too
# A message that is posted before a frame is drawn arrives after it.
_WATCH = f"""
new MutationObserver((_, watch) => {{
  if (!document.querySelector("{MEANINGFUL}")) return;
  watch.disconnect();
  requestAnimationFrame(() => {{
    const drawn = new MessageChannel();
    drawn.port1.onmessage = () => {{ window.meaningfulPaint = performance.now(); }};
    drawn.port2.postMessage(0);
  }});
}}).observe(document, {{childList: true, subtree: true}});
"""


@contextmanager
def viewer() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder, headless(Path(folder)) as browser:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        yield browser


def link(page: str, query: dict[str, str | list[str]]) -> str:
    asked = "&".join(f"{name}={value}" for name, value in query.items()).replace(" ", "+")
    return f"{'' if page == 'overview' else page}?{asked}".replace("%", "%25").rstrip("?")


def seconds_to_paint(browser: Any, url: str) -> float:
    """From the navigation to the frame that shows the first chart or table, by the page's clock:
    asking from outside waits for whatever script runs."""
    browser.get("about:blank")
    browser.get(url)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        painted = browser.execute_script("return window.meaningfulPaint")
        if painted is not None:
            return float(painted) / 1e3
        time.sleep(0.1)
    raise RuntimeError(f"{url} shows neither chart nor table within {_PATIENCE_S} s")


def show_paints(url: str, views: Sequence[View], repetitions: int) -> None:
    """A row a page; the load of the machine's processors stands below, since it makes the times."""
    out = sys.stdout.write
    out("| page | first chart or table, s, median | longest |\n| --- | ---: | ---: |\n")
    with viewer() as browser:
        seconds_to_paint(browser, url)  # the first viewer waits for imports, too
        for page, query in views:
            address = f"{url}/{link(page, query)}"
            times = [seconds_to_paint(browser, address) for _ in range(repetitions)]
            out(f"| {link(page, query) or 'overview'} | {np.median(times):.2f} | ")
            out(f"{max(times):.2f} |\n")
            sys.stdout.flush()
    out(f"\nload of {os.cpu_count()} processors over five minutes: {os.getloadavg()[1]:.1f}\n")


def app_memory_mb() -> float:
    """Proportional set size of this process's children and theirs, but for Chromium's."""
    total = 0
    for pid in _descendants(os.getpid()):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith("python"):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="the path of a SQLite file")
    parser.add_argument("--repetitions", type=int, default=5, help="0: memory alone")
    parser.add_argument("--viewers", type=int, default=5)
    asked = parser.parse_args()
    out = sys.stdout.write
    painted = [view for view in VIEWS if view[0] not in ("paper", "sweep")]
    with dashboard_on(Path(asked.database)) as url:
        if asked.repetitions:
            show_paints(url, painted, asked.repetitions)
        with ExitStack() as opened:
            browsers = [opened.enter_context(viewer()) for _ in range(asked.viewers)]
            for i, browser in enumerate(browsers):
                for page, query in painted[i::2]:
                    seconds_to_paint(browser, f"{url}/{link(page, query)}")
            out(f"\n{app_memory_mb():.0f} MB with {asked.viewers} viewers\n")


if __name__ == "__main__":
    main()
