"""The app in a real browser, over the example results."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from db.engine import open_database
from db.exchange import import_file

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / ".artifacts"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1500,1600",
)

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver on the PATH"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard on the example results, started as a person starts it."""
    path = tmp_path_factory.mktemp("dashboard") / "examples.sqlite"
    with open_database(str(path)) as database:
        for file in sorted((ROOT / "examples" / "h200").glob("*.parquet")):
            with database.session() as session:
                import_file(session, file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (sys.executable, "-m", "flexq_bench.cli", "dashboard", "--db", str(path))
    process = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/_stcore/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"{url} does not answer")


def test_results_are_drawn_without_an_error(address: str, tmp_path: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        browser.get(f"{address}/?m=8")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if len(browser.find_elements("css selector", ".js-plotly-plot")) == 2:
                break
            time.sleep(0.2)
        time.sleep(1)  # let the charts finish their first drawing
        ARTIFACTS.mkdir(exist_ok=True)
        browser.save_screenshot(str(ARTIFACTS / "results.png"))

        assert len(browser.find_elements("css selector", ".js-plotly-plot")) == 2
        assert not browser.find_elements("css selector", "[data-testid=stException]")
        assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
        assert "Speed-up over cublaslt-w8a8" in browser.page_source
    finally:
        browser.quit()
