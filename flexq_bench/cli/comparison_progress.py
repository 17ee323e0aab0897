"""Progress of comparisons, for `compare`, `gate perf` and `bisect`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flexq_bench.cli.progress import Progress
from flexq_bench.cli.progress import progress as shown_progress
from flexq_bench.interrupts import ended_by_terminate

if TYPE_CHECKING:
    from flexq_bench.measure.ab.rules import OnProgress, ShownProgress


@contextmanager
def progress() -> Iterator[OnProgress]:
    """Show the state of a comparison; within the context SIGTERM raises KeyboardInterrupt."""
    with ended_by_terminate(), shown_progress("getting ready") as bar:
        yield lambda state: bar.update(
            state.done, state.expected, state.in_words, left_s=state.left_s
        )


class SearchProgress:
    """Progress of a bisection: comparisons of one commit after the other.

    comparisons: expected; skipped commits add more. processes: pairs of processes of a comparison.
    """

    def __init__(self, bar: Progress, comparisons: int, processes: int) -> None:
        self._bar, self._left, self._processes = bar, comparisons, processes
        self._before = self._done = 0  # pairs of earlier comparisons, and with the current one's

    def skip(self, comparisons: int) -> None:
        """Count comparisons whose results are known."""
        self._left = max(self._left - comparisons, 1)

    def of_commit(self, commit: str) -> OnProgress:
        """Begin a comparison; return the function to call with its states."""
        self._left = max(self._left - 1, 0)
        self._before = self._done

        def show(state: ShownProgress) -> None:
            self._done = self._before + state.done
            expected = self._before + state.expected + self._left * self._processes
            self._bar.update(self._done, expected, f"{commit[:10]}: {state.in_words}")

        return show


@contextmanager
def search_progress(commits: int, processes: int) -> Iterator[SearchProgress]:
    """Show the progress of a search among commits, as `progress`."""
    with ended_by_terminate(), shown_progress("comparing") as bar:
        # The comparison of the ends, and a binary search between them.
        yield SearchProgress(bar, 1 + (commits - 1).bit_length(), processes)
