"""Create the pictures of the dashboard in the documentation, of the demo's database.

python benchmarks/dashboard/pictures.py
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
PAGES = {
    "home": ("?project=acme", 1300),
    "alert": ("alert", 1500),
    "leaderboard": ("leaderboard?model=llama-2-7b&layer=k_proj", 1050),
    "kernels": ("kernels?view=heat+map", 1100),
    "ship": ("ship", 1100),
    "accuracy": ("accuracy?model=tiny-llama", 1650),
}
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
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, headless(Path(folder)) as browser:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if options.dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        with dashboard_on(None) as url:
            for name, (address, height) in PAGES.items():
                file = options.out / f"dashboard-{name}.png"
                take(browser, f"{url}/{address}", height, file)
                sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
