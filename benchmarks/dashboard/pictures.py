"""Create the pictures of the dashboard in the documentation.

Leaderboard, Kernels and Accuracy show the repository's example records. Home and Alert show a
database created by benchmarks/db/fill.py, because the examples have no alerts and no nightly runs.

    python benchmarks/db/fill.py made-up.sqlite --nights 20
    python benchmarks/dashboard/pictures.py --made-up made-up.sqlite
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))
from browsing import dashboard_on, headless

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH_PX = 1500
# Name: the page with its controls, and the height that is shown, pixels.
OF_EXAMPLES = {
    "leaderboard": ("leaderboard?model=llama-2-7b&layer=down_proj", 1300),
    "kernels": ("kernels?view=heat+map", 1100),
    "linear": ("kernels?view=gemm+against+linear&tokens=8", 1150),
    "accuracy": ("accuracy?model=tiny-llama", 1650),
}
MADE_UP = {"home": ("", 1100), "alert": ("alert", 1500)}
_BUSY = "[data-testid=stStatusWidget], [data-testid=stSkeleton], [data-stale=true]"
_PATIENCE_S = 240


def take(browser: Any, url: str, height: int, file: Path) -> None:
    """A picture of a page once it has settled."""
    size = {"width": WIDTH_PX, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    deadline = time.monotonic() + _PATIENCE_S
    settled = 0
    while settled < 5:  # looks: between two runs of a page it seems settled for a moment
        there = browser.find_elements("css selector", "h1")
        is_busy = browser.find_elements("css selector", _BUSY)
        settled = settled + 1 if there and not is_busy else 0
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} does not settle within {_PATIENCE_S} s")
        time.sleep(0.5)
    browser.save_screenshot(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--made-up", type=Path, help="a database of fill.py")
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    pages = [(None, OF_EXAMPLES)] + ([(options.made_up, MADE_UP)] if options.made_up else [])
    with tempfile.TemporaryDirectory() as folder, headless(Path(folder)) as browser:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if options.dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        for database, shown in pages:
            with dashboard_on(database) as url:
                for name, (address, height) in shown.items():
                    file = options.out / f"dashboard-{name}.png"
                    take(browser, f"{url}/{address}", height, file)
                    sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
