"""A real browser on the app, for tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

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
IN_A_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver on the PATH"
    ),
]

POINT = ".js-plotly-plot .scatterlayer .point"
_MAX_START_S = 240
# Colours are tested without a browser; a dark page takes as long as a light one.
THEMES = ["light", pytest.param("dark", marks=pytest.mark.slow)]


@contextmanager
def dashboard_on(path: Path | None, *, below: str = "") -> Iterator[str]:
    """Start the dashboard by its command, give its address, and end it.

    path: of the database; None: the demo's. below: the path that a proxy would serve it below.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    source = ("demo",) if path is None else ("dashboard", "--db", str(path), "--base-path", below)
    command = (sys.executable, "-m", "flexq_bench.cli", *source)
    options = ["--port", str(port)]
    url = f"http://127.0.0.1:{port}/{below}".rstrip("/")
    with served([*command, *options], lambda: answers(f"{url}/_stcore/health")):
        yield url
    assert not answers(url), "the app outlives its command"


@contextmanager
def served(
    command: Sequence[str], is_ready: Callable[[], object]
) -> Iterator[subprocess.Popen[str]]:
    """Start a server, give its process once it answers, and end it after the block.

    Raises RuntimeError if it ends by itself, with its error output, or does not answer.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors, text=True
        )
        try:
            deadline = time.monotonic() + _MAX_START_S
            while not is_ready():
                if process.poll() is not None:
                    errors.seek(0)
                    raise RuntimeError(f"exit code {process.returncode}: {errors.read().strip()}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{command[-1]}: no answer within {_MAX_START_S} s")
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)


def children_named(name: str) -> list[int]:
    """Return the descendants of this process whose command begins with this name."""
    found, waiting = [], [os.getpid()]
    while waiting:
        with suppress(OSError):  # it has ended meanwhile
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                children = [int(pid) for pid in (task / "children").read_text().split()]
                waiting += children
                for pid in children:
                    if Path(f"/proc/{pid}/comm").read_text().startswith(name):
                        found.append(pid)
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of processes and of their children that ended, user and system, s."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def used_cpu() -> tuple[float, float]:
    """CPU time, s, of the dashboard and of the browser, which are children of this process."""
    return cpu_seconds(children_named("python")), cpu_seconds(children_named("chrom"))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], object], otherwise: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(otherwise)
        time.sleep(0.1)


@contextmanager
def headless(folder: Path) -> Iterator[Any]:
    """A headless Chromium in Tokyo that saves files in the folder."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Tokyo"})
    try:
        yield driver
    finally:
        driver.quit()


def errors(browser: Any) -> list[str]:
    """Return the errors of the browser's console.

    Left out are requests by which Streamlit finds the path that it is served below: at a link to a
    page, the first of them fails.
    """
    severe = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    return [message for message in severe if "/_stcore/" not in message or " 404 " not in message]


def show_in(browser: Any, theme: str) -> None:
    """Prefer this theme, light or dark, on pages that are opened later."""
    media = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def look(browser: Any, url: str, until: str, *, theme: str = "light", name: str) -> str:
    """Open a page, wait for an element, save a picture, return the text. There may be no errors."""
    show_in(browser, theme)
    browser.get(url)
    wait_for(lambda: browser.find_elements("css selector", until), f"no {until} on {url}")
    is_busy = "[data-testid=stStatusWidget], [data-testid=stSkeleton], [data-stale=true]"
    wait_for(lambda: not browser.find_elements("css selector", is_busy), f"{url} never settles")
    text = settled_text(browser)
    ARTIFACTS.mkdir(exist_ok=True)
    browser.save_screenshot(str(ARTIFACTS / f"{name}.png"))
    assert not browser.find_elements("css selector", "[data-testid=stException]")
    messages = errors(browser)
    assert messages == [], messages
    return text


def body(browser: Any) -> str:
    text: str = browser.find_element("tag name", "body").text
    return text


def click(browser: Any, label: str) -> None:
    """Click a radio button, or another button, by its label."""
    elements = browser.find_elements(
        "xpath", f"//label[.//p[text()='{label}']] | //button[.//p[text()='{label}']]"
    )
    (button,) = [element for element in elements if element.is_displayed()]
    browser.execute_script("arguments[0].click()", button)


def settled_text(browser: Any) -> str:
    """Return the text of a page once its charts are drawn."""
    texts: list[str] = []

    def is_same() -> bool:
        time.sleep(0.8)
        texts.append(browser.find_element("tag name", "body").text)
        return len(texts) > 1 and texts[-1] == texts[-2]

    wait_for(is_same, "the page's text never settles")
    return texts[-1]


def open_sweep_form(browser: Any, url: str, *, name: str) -> None:
    """Open the form of a sweep, by N and K."""
    look(browser, f"{url}/sweep", "[data-testid=stForm]", name=name)
    click(browser, "N and K")
    wait_for(lambda: _inputs(browser, "N (output features)"), "the form has no N")


def fill_sweep_form(
    browser: Any, *, n: str = "128", k: str = "256", m: str = "1", person: str = "Ada"
) -> None:
    """Type sizes and a name into the open form of a sweep."""
    texts = {"N (output features)": n, "K (input features)": k, "M (tokens)": m}
    for label, text in (texts | {"Your name": person}).items():
        (box,) = _inputs(browser, label)
        box.send_keys("\ue009" + "a" + "\ue009")  # Control, a, Control: selects all
        box.send_keys(text)
        time.sleep(0.2)  # the box sends its text to the form after a moment


def _inputs(browser: Any, label: str) -> list[Any]:
    return list(browser.find_elements("css selector", f"input[aria-label='{label}']"))
