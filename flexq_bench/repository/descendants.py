"""Descendants of a process: finding, stopping and killing them.

A signal to a process group is not enough: a process that starts its own session leaves the group,
and a process whose parent has ended becomes a child of init. All descendants inherit the
environment, though. A variable with a random name therefore marks them; on Linux, a user can read
the environments of own processes in /proc.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_PREFIX = "FLEXQ_BENCH_STARTED_"
_ROUNDS = 20  # a process may start another one between the search and the signal


def new_mark() -> str:
    """Return a random name of an environment variable that marks a process and its descendants."""
    return _PREFIX + secrets.token_hex(8)


def marks_in(environment: Iterable[str]) -> list[str]:
    """Return the marks among the names of variables."""
    return [name for name in environment if name.startswith(_PREFIX)]


def end_marked(mark: str) -> None:
    """Kill all of this user's processes whose environment has the mark, and their children.

    A process is not found if it cleared its environment and its parent ended before the search; an
    unprivileged process can't trace it. Does nothing without /proc.
    """
    for _ in range(_ROUNDS):
        pids = _marked(mark.encode() + b"=")
        if not pids:
            return
        _signal(pids, signal.SIGKILL)


def stop_marked(mark: str, besides: Iterable[int] = ()) -> set[int]:
    """Stop (SIGSTOP) the processes that `end_marked` would kill, and return their ids.

    besides: ids of processes to leave running.
    """
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        pids = _marked(mark.encode() + b"=") - stopped - set(besides)
        if not pids:
            break
        _signal(pids, signal.SIGSTOP)
        stopped |= pids
    return stopped


def continue_stopped(pids: Iterable[int]) -> None:
    """Continue the processes that `stop_marked` stopped."""
    _signal(pids, signal.SIGCONT)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _marked(start: bytes) -> set[int]:
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):  # the process has ended, or belongs to another user
            # The name of the program, in brackets, may contain any bytes.
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state in (b"Z", b"X"):
                continue
            parents[pid] = int(parent)
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(start) for variable in variables):
                pids.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {os.getpid()}
