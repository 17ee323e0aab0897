"""Exit codes of every command."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

INTERRUPTED = 130  # as shells report for a program ended by SIGINT
UNREAD = 141  # as shells report for SIGPIPE: the reader closed the pipe, as `| head` does


class ExitCode(IntEnum):
    """Exit status of `flexq-bench`, the same for every verb."""

    PASS = 0
    REGRESSION = 1  # performance or accuracy
    USAGE = 2  # the request is invalid
    AMBIGUOUS = 3  # the data are not conclusive
    MISSING = 4  # planned results are missing
    INFRASTRUCTURE = 5  # a machine, a device or a store failed


def worst_exit_code(codes: Iterable[int]) -> int:
    """Combine the exit codes of several runs; the most severe one wins."""
    ranked = (
        ExitCode.INFRASTRUCTURE,
        ExitCode.MISSING,
        ExitCode.REGRESSION,
        ExitCode.AMBIGUOUS,
    )
    present = set(codes)
    return next((int(code) for code in ranked if code in present), max(present, default=0))
