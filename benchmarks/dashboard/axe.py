"""Accessibility violations on each page of the dashboard, found by axe-core.

Opens every page of the dashboard in Chromium, with the light and the dark theme, runs axe-core on
it, and prints each violation with its impact, the number of affected elements, and one of them.
Fails if one is serious or critical. axe-core comes from npm (`npm pack axe-core`) and is not a
dependency of this project:

    python benchmarks/dashboard/axe.py results.sqlite --axe package/axe.min.js
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))
from browsing import dashboard_on, headless, show_in

VIEWS = Path(__file__).parents[2] / "dashboard" / "views"
FIRST = "home"
BAD = ("serious", "critical")
THEMES = ("light", "dark")
_BUSY = "[data-testid=stStatusWidget], [data-testid=stSkeleton], [data-stale=true]"
_PATIENCE_S = 120
_RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then(
  (results) => done(results.violations.map((rule) => ({
    id: rule.id, impact: rule.impact, help: rule.help, count: rule.nodes.length,
    example: rule.nodes[0].html.slice(0, 160),
  }))),
  (error) => done([{id: "axe", impact: "critical", help: String(error), count: 1, example: ""}]),
);
"""


def violations(browser: Any, url: str, axe: str) -> list[dict[str, Any]]:
    """Return axe-core's violations on a page once it has finished rendering."""
    browser.get(url)
    deadline = time.monotonic() + _PATIENCE_S
    while not browser.find_elements("css selector", "h1") or browser.find_elements(
        "css selector", _BUSY
    ):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} does not settle within {_PATIENCE_S} s")
        time.sleep(0.1)
    browser.set_script_timeout(_PATIENCE_S)
    browser.execute_script(axe)
    results: list[dict[str, Any]] = browser.execute_async_script(_RUN)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="the path of a SQLite file")
    parser.add_argument("--axe", required=True, type=Path, help="axe.min.js of axe-core's package")
    options = parser.parse_args()
    axe = options.axe.read_text(encoding="utf-8")
    pages = sorted(path.parent.name for path in VIEWS.glob("*/page.py"))
    bad = every = 0
    with (
        dashboard_on(Path(options.database)) as url,
        tempfile.TemporaryDirectory() as folder,
        headless(Path(folder)) as browser,
    ):
        for theme, page in product(THEMES, pages):
            show_in(browser, theme)
            address = url if page == FIRST else f"{url}/{page}"
            for rule in violations(browser, address, axe):
                bad += rule["impact"] in BAD
                every += 1
                sys.stdout.write(
                    f"{page}, {theme}: {rule['impact']}: {rule['id']}, {rule['count']} elements: "
                    f"{rule['help']}: {rule['example']}\n"
                )
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(pages)} pages in {len(THEMES)} themes, {every} violations, {bad} of them serious or "
        "critical\n"
    )
    sys.exit(int(bad > 0))


if __name__ == "__main__":
    main()
