"""Exit codes of every command."""

from __future__ import annotations

from enum import IntEnum

INTERRUPTED = 130  # what shells report for a program that SIGINT ended
UNREAD = 141  # and for one that SIGPIPE ended: its reader went away, as `| head` does


class ExitCode(IntEnum):
    """Exit status of `flexq-bench`, the same for every verb."""

    PASS = 0
    REGRESSION = 1  # performance or accuracy
    USAGE = 2  # what was asked for can't be
    AMBIGUOUS = 3  # the data doesn't decide
    MISSING = 4  # planned results did not arrive
    INFRASTRUCTURE = 5  # a machine, a device or a store failed
