"""Progress of a command: a bar on a terminal, else one line every ten seconds on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from flexq_bench.cli.output import console, printable, say

INTERVAL_S = 10.0  # between two lines


class Progress:
    """Completed steps of a total. total None: unknown; then no remaining time is shown.

    Its methods may be called from any thread.
    """

    def __init__(self, what: str, total: int | None, bar: Bar, began: float) -> None:
        self._what, self._total, self._done, self._began = what, total, 0, began
        self._ends_at: float | None = None
        self._bar, self._task = bar, bar.add_task(what, total=total, left=self.left)

    @property
    def out(self) -> Console:
        """The console for lines above the bar."""
        return self._bar.console

    def advance(self, what: str = "") -> None:
        """Count a completed step. what: its description."""
        self.update(self._done + 1, max(self._total, self._done + 1) if self._total else None, what)

    def update(
        self, done: int, total: int | None, what: str = "", *, left_s: float | None = None
    ) -> None:
        """Set the number of steps done and the total.

        left_s: seconds left; None: as if all steps took as long as those done.
        """
        self._done, self._total = done, total
        self._ends_at = None if left_s is None else time.monotonic() + left_s
        self._what = what or self._what
        self._bar.update(self._task, completed=done, total=total, description=printable(self._what))

    def say(self, what: str) -> None:
        """Show the current activity, without counting a step."""
        self._what = what
        self._bar.update(self._task, description=printable(what))

    def line(self, now: float) -> str:
        """Format the last step, the completed steps, and the elapsed and remaining time."""
        passed = now - self._began
        if not self._total:
            counted = f"{self._done} done" if self._done else "not a step done yet"
            return f"{self._what}: {counted} in {_span(passed)}"
        left = self.left(now)
        line = f"{self._what}: {self._done} of {self._total} in {_span(passed)}"
        return f"{line}, about {left} left" if left else line

    def left(self, now: float) -> str:
        """Format the remaining time; empty: not known."""
        if self._ends_at is not None:
            return _span(max(self._ends_at - now, 0.0))
        if not self._total or not self._done:
            return ""
        return _span((now - self._began) / self._done * (self._total - self._done))


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["left"](time.monotonic()))


@contextmanager
def progress(
    what: str, total: int | None = None, *, interval_s: float = INTERVAL_S
) -> Iterator[Progress]:
    """Show the progress of the block: a bar on a terminal, else one line per interval.

    A block that ends sooner prints no line.
    """
    err = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left:"), _Left())
    bar = Bar(*columns, *times, console=err, transient=True, disable=not err.is_terminal)
    with bar:
        shown = Progress(what, total, bar, time.monotonic())
        if err.is_terminal:
            yield shown
            return
        ended = threading.Event()

        def print_lines() -> None:
            while not ended.wait(interval_s):
                say(err, shown.line(time.monotonic()))

        thread = threading.Thread(target=print_lines, name="progress", daemon=True)
        thread.start()
        try:
            yield shown
        finally:
            ended.set()
            thread.join()


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole / 60:.0f} min"
    return f"{whole / 3600:.1f} h"
