"""Time until a page shows its main content, and memory of the app with several viewers.

Starts the dashboard, opens each page in headless Chromium and measures, over repetitions, the time
from the navigation until its headline and its main table or figure are painted, the time until its
first figure, and the CPU seconds of the server and of Chromium until then. Then opens several
viewers at once, each on another page, and sums the memory (PSS) of the app's processes. Prints the
numbers that docs/dashboard.md quotes:

    python benchmarks/db/browser.py large.sqlite
"""

from __future__ import annotations

import argparse
import json
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
from browsing import children_named, dashboard_on, headless, used_cpu

View = tuple[str, dict[str, str | list[str]]]
TABLE = "[data-testid=stDataFrame] canvas"
FIGURE = ".js-plotly-plot .trace, .js-plotly-plot .hm"
# What a page is about; the others have charts below their tables, or none.
MAIN = {
    **dict.fromkeys(("history", "measurement", "kernels", "paper"), FIGURE),
    "sweep": "[data-testid=stForm], [data-testid=stAlert]",
    "": "[aria-label=Kernels] td",  # of Home
}
LIMIT_S, HOME_LIMIT_S, FIRST_VIEWER_LIMIT_S = 2.5, 1.0, 3.0
WITHOUT_FIGURE = ("home", "triage", "sweep")
_HEADLINE = "h1, h2"
_PATIENCE_S = 300  # several browsers on two cores that others use, too
# A message that is posted before a frame is drawn arrives after it.
_WATCH = f"""
window.painted = {{}};
const about = {json.dumps(MAIN)}[location.pathname.split("/").pop()] ?? "{TABLE}";
const wanted = {{main: ["{_HEADLINE}", about], figure: ["{FIGURE}"]}};
new MutationObserver(() => {{
  for (const [name, parts] of Object.entries(wanted)) {{
    if (!parts.every((part) => document.querySelector(part))) continue;
    delete wanted[name];
    requestAnimationFrame(() => {{
      const drawn = new MessageChannel();
      drawn.port1.onmessage = () => {{ window.painted[name] = performance.now(); }};
      drawn.port2.postMessage(0);
    }});
  }}
}}).observe(document, {{childList: true, subtree: true}});
"""


@contextmanager
def viewer() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder, headless(Path(folder)) as browser:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        yield browser


def link(page: str, query: dict[str, str | list[str]]) -> str:
    options = "&".join(f"{name}={value}" for name, value in query.items()).replace(" ", "+")
    return f"{'' if page == 'home' else page}?{options}".replace("%", "%25").rstrip("?")


def seconds_to_paint(browser: Any, url: str, what: Sequence[str] = ("main",)) -> list[float]:
    """Return the time from the navigation to the frame that shows each of these.

    The page's own clock is used: a question of the driver waits for the script that runs.
    """
    browser.get("about:blank")
    browser.get(url)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        painted = browser.execute_script("return window.painted")
        if set(what) <= set(painted):
            return [float(painted[name]) / 1e3 for name in what]
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not show {' and '.join(what)} within {_PATIENCE_S} s")


def show_paints(url: str, views: Sequence[View], repetitions: int) -> bool:
    """A row a page, and the load of the machine's processors, since it makes the times; whether
    every median, and the first viewer's time, is below its limit."""
    out = sys.stdout.write
    out("| page | paint, s, median | longest | first figure, s, median ")
    out("| CPU of the server, s | of Chromium, s |\n| --- | ---: | ---: | ---: | ---: | ---: |\n")
    passed = True
    with viewer() as browser:
        before = used_cpu()
        (first,) = seconds_to_paint(browser, url)  # fills the caches
        of_server, of_browser = np.array(used_cpu()) - before
        out(f"| home, first viewer | {first:.2f} | {first:.2f} | – | ")
        out(f"{of_server:.2f} | {of_browser:.2f} |\n")
        passed &= first < FIRST_VIEWER_LIMIT_S
        for page, query in views:
            what = ("main",) if page in WITHOUT_FIGURE else ("main", "figure")
            address = f"{url}/{link(page, query)}"
            rows, before = [], used_cpu()
            for _ in range(repetitions):
                rows.append(seconds_to_paint(browser, address, what))
            of_server, of_browser = (np.array(used_cpu()) - before) / repetitions
            times = np.array(rows)
            median = np.median(times, axis=0)
            passed &= bool(median[0] < (HOME_LIMIT_S if page == "home" else LIMIT_S))
            figure = f"{median[1]:.2f}" if len(what) > 1 else "–"
            out(f"| {link(page, query) or 'home'} | {median[0]:.2f} | ")
            out(f"{times[:, 0].max():.2f} | {figure} | {of_server:.2f} | {of_browser:.2f} |\n")
            sys.stdout.flush()
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    out(f"\nload of {os.cpu_count()} processors over 1, 5 and 15 minutes: {loads}\n")
    return passed


def app_memory_mb() -> float:
    """Proportional set size of this process's children and theirs, but for Chromium's."""
    total = 0
    for pid in children_named("python"):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="the path of a SQLite file")
    parser.add_argument("--repetitions", type=int, default=5, help="0: memory alone")
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--page", help="this one alone, and no memory")
    options = parser.parse_args()
    out = sys.stdout.write
    passed = True
    with dashboard_on(Path(options.database)) as url:
        if options.repetitions:
            views = [view for view in VIEWS if options.page in (None, view[0])]
            passed = show_paints(url, views, options.repetitions)
        if options.page is not None:
            sys.exit(int(not passed))
        with ExitStack() as opened:
            browsers = [opened.enter_context(viewer()) for _ in range(options.viewers)]
            for i, browser in enumerate(browsers):
                for page, query in VIEWS[i::2]:
                    seconds_to_paint(browser, f"{url}/{link(page, query)}")
            out(f"\n{app_memory_mb():.0f} MB with {options.viewers} viewers\n")
    sys.exit(int(not passed))


if __name__ == "__main__":
    main()
