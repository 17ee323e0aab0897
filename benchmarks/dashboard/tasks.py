"""Seven typical questions to the dashboard: clicks and seconds to the answer, in Chromium.

Starts the dashboard on a database, opens its first page, and navigates to each answer by clicking.
Counted for each task are its clicks (without typing), the time from the last click until the answer
is painted, and the time from opening the page until its first chart is painted. Other work on the
machine makes these times longer, so the CPU seconds of server and browser until the chart are
reported too. Prints a table, and fails if a task takes more than three clicks or its first chart
more than 2.5 s:

    python benchmarks/db/fill.py large.sqlite
    python benchmarks/dashboard/tasks.py large.sqlite
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))
from browsing import dashboard_on, headless, used_cpu

MOST_CLICKS, LIMIT_S = 3, 2.5
_PATIENCE_S = 120
_CHART = ".js-plotly-plot .trace, .js-plotly-plot .hm, .js-plotly-plot .points path"
_SETTLED = "[data-testid=stStatusWidget], [data-testid=stSkeleton], [data-stale=true]"


@dataclass(frozen=True, slots=True)
class Task:
    """steps: what is clicked, one after the other. answered: words that the answer has.

    charted: whether the page that answers has a chart.
    """

    question: str
    steps: tuple[Callable[[Any], Any], ...]
    answered: tuple[str, ...]
    charted: bool = True


def page(address: str) -> Callable[[Any], Any]:
    """A page's link in the side bar, or among the pages of a section."""
    css = f"[data-testid=stSidebarNav] a[href$='/{address}'], .st-key-section a[href$='/{address}']"
    return lambda browser: browser.find_element("css selector", css)


def alert_link(browser: Any) -> Any:
    """The first open alert on Home."""
    return browser.find_element("css selector", "[data-testid=stPageLink] a[href*='alert=']")


def button(words: str) -> Callable[[Any], Any]:
    """A radio button, or another button, by what it says."""
    path = (
        f"//label[.//p[normalize-space()='{words}']] | //button[.//p[normalize-space()='{words}']]"
    )
    return lambda browser: browser.find_element("xpath", path)


def select(label: str) -> Callable[[Any], Any]:
    """The list of this name."""
    path = f"//div[@data-testid='stSelectbox'][.//p[normalize-space()='{label}']]//input"
    return lambda browser: browser.find_element("xpath", path)


def option(words: str) -> Callable[[Any], Any]:
    """An entry of the list that is open."""
    path = f"//*[@role='option'][normalize-space()='{words}']"
    return lambda browser: browser.find_element("xpath", path)


TASKS = (
    Task(
        "Which commit made it slower, how much, and is it real?",
        (alert_link,),
        ("the worst of", "Machine code", "Reproduce"),
    ),
    Task(
        "Which kernel is fastest for my layer?",
        (page("leaderboard"), select("Layer"), option("o_proj")),
        ("o_proj", "is fastest"),
    ),
    Task(
        "How fast does a model decode at batch 4?", (page("accuracy"), page("decode")), ("Latency",)
    ),
    Task("What does quantization cost in accuracy?", (page("accuracy"),), ("Perplexity",)),
    Task(
        "What differs between two commits?",
        (page("compare"), button("commits")),
        ("against", "Cases"),
    ),
    Task(
        "Do we reach what the paper says?",
        (page("compare"), page("paper")),
        ("Published numbers", "Not here"),
    ),
    Task(
        "Measure these shapes for me.", (page("results"), page("sweep")), ("Sweep",), charted=False
    ),
)


@dataclass(frozen=True, slots=True)
class Performed:
    """Seconds. to_answer: from the last click. to_chart: from the first one; None: there is none.

    of_server, of_browser: of a processor, until the chart, or until the answer without one.
    """

    to_answer: float
    to_chart: float | None
    of_server: float
    of_browser: float


def perform(browser: Any, url: str, task: Task) -> Performed:
    """Go to the answer once, from the first page."""
    browser.get(url)
    _wait(lambda: browser.find_elements("css selector", "[data-testid=stSidebarNav] a"))
    _wait(lambda: _is_settled(browser))
    charted, spent = None, (0.0, 0.0)
    before = used_cpu()

    def spent_now() -> tuple[float, float]:
        of_server, of_browser = used_cpu()
        return of_server - before[0], of_browser - before[1]

    for step in task.steps:
        _wait(partial(step, browser))
        _click(browser, step(browser))
        start = time.perf_counter()
        if step is task.steps[0] and task.charted:  # the page's link: it comes with its chart
            charted = _seconds_to_chart(browser, start)
            spent = spent_now()
    _wait(lambda: all(words in _text(browser) for words in task.answered))
    return Performed(
        time.perf_counter() - start, charted, *(spent_now() if charted is None else spent)
    )


def _click(browser: Any, element: Any) -> None:
    try:
        element.click()
    except Exception:  # another element lies over it, as over a styled radio button
        browser.execute_script("arguments[0].click()", element)


def _seconds_to_chart(browser: Any, start: float) -> float:
    _wait(lambda: browser.find_elements("css selector", _CHART))
    return time.perf_counter() - start


def _is_settled(browser: Any) -> bool:
    return not browser.find_elements("css selector", _SETTLED)


def _text(browser: Any) -> str:
    return str(browser.find_element("tag name", "body").text)


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.perf_counter() + _PATIENCE_S
    while True:
        try:
            if condition():
                return
        except Exception as error:  # not there yet, or replaced while it was looked at
            problem: object = error
        else:
            problem = "it is not there"
        if time.perf_counter() > deadline:
            raise RuntimeError(f"not within {_PATIENCE_S} s: {problem}")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="the path of a SQLite file")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    out, failed = sys.stdout.write, False
    out("| task | clicks | answer, s | first chart, s | CPU of the server, s | of Chromium, s |\n")
    out("| --- | ---: | ---: | ---: | ---: | ---: |\n")
    with (
        dashboard_on(Path(options.database)) as url,
        tempfile.TemporaryDirectory() as folder,
        headless(Path(folder)) as browser,
    ):
        for task in TASKS:
            perform(browser, url, task)  # imports, and the browser's cache
            runs = [perform(browser, url, task) for _ in range(options.repetitions)]
            charts = [run.to_chart for run in runs if run.to_chart is not None]
            chart = f"{np.median(charts):.2f}" if charts else "–"
            answer, of_server, of_browser = np.median(
                [(run.to_answer, run.of_server, run.of_browser) for run in runs], axis=0
            )
            out(f"| {task.question} | {len(task.steps)} | {answer:.2f} | {chart} | ")
            out(f"{of_server:.2f} | {of_browser:.2f} |\n")
            sys.stdout.flush()
            slow = bool(charts) and float(np.median(charts)) >= LIMIT_S
            failed |= len(task.steps) > MOST_CLICKS or slow
    out("\nMedians. ")
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    out(f"Load of {os.cpu_count()} processors over 1, 5 and 15 minutes: {loads}\n")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
