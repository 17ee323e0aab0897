"""Retry policy: failures that count against a job or a device, attempts, and pauses between them.

| failure                                   | the job                                    |
| ----------------------------------------- | ------------------------------------------ |
| the worker's process dies or hangs        | requeued, its number of deaths plus one    |
| the worker reports a broken device        | requeued                                   |
| its node is lost, or the run is stopped   | requeued                                   |
| a comparison fails on the device          | requeued, its number of deaths plus one    |
| the job has `MAX_DEATHS` deaths           | quarantined: `failed` is its result        |
| code that can't be compared anywhere      | refused                                    |

A job is requeued for another device of its kind, as long as one has not tried it.

A lost worker is replaced at once; if its device fails again, after pauses that double each time.
After `MAX_FAILURES` in a row no run waits for the device any more, but it is still retried.

If a server dies, the next one takes its request; a server that is stopped or whose device fails
returns it. While the database is unavailable, servers wait and no death is counted. A request ends
when its run is complete, when it is cancelled, when `MAX_DEATHS` servers in a row died while
serving it without a result, or when it can't be measured as requested (the refusals below), which
holds for every other server too.
"""

from __future__ import annotations

from flexq_bench.errors import (
    BrokenRevisionError,
    FlexqError,
    InfrastructureError,
    MeasureError,
    UsageError,
)
from flexq_bench.kernels.errors import KernelError
from flexq_bench.workloads.errors import WorkloadError

MAX_DEATHS = 3  # per job or evaluation; per request: in a row, without a result between them
MAX_FAILURES = 3  # per slot, in a row
MAX_PAUSE_S = 60.0
_NODE_DIED = "its node has died"  # part of Ray's message

# Errors that end a request as failed: while it is planned, while it is measured, and while its
# commits are compared, which any other device would raise too.
PLANNING_REFUSALS = (FlexqError, WorkloadError, KernelError)
MEASURING_REFUSALS = (MeasureError,)
REVISION_REFUSALS = (UsageError, BrokenRevisionError, WorkloadError, KernelError)


def is_quarantined(deaths: int) -> bool:
    """Return True if a job with this number of worker deaths is quarantined."""
    return deaths >= MAX_DEATHS


def quarantine_detail(deaths: int) -> str:
    """The detail of a quarantined job's result."""
    return f"quarantined: {deaths} workers ended while they measured it"


def comparison_quarantine(deaths: int, reason: str) -> str:
    """The reason of a quarantined job that compares. reason: of its last failure."""
    return f"given up after {deaths} attempts, the last: {reason}"


def is_blameless(error: BaseException, reason: str, *, node_is_alive: bool) -> bool:
    """Return True if the loss of a worker does not count as a death of its job.

    error: raised by Ray instead of the worker's result; reason: the same in one line.
    """
    return isinstance(error, InfrastructureError) or not node_is_alive or _NODE_DIED in reason


def is_given_up(failures: int) -> bool:
    """Return True if runs no longer wait for a slot with this number of failures in a row."""
    return failures >= MAX_FAILURES


def pause_s(failures: int) -> float:
    """Return the seconds until a slot is tried again after this number of failures in a row."""
    # No pause after the first: the case may have ended the process, not the device.
    return 0.0 if failures == 1 else min(2.0**failures, MAX_PAUSE_S)
