"""Descendants of a process: finding, stopping and killing them.

A signal to a process group is not enough: a process that starts its own session leaves the group,
and a process whose parent has ended becomes a child of init. All descendants inherit the
environment, though. A variable with a random name therefore marks them; on Linux, a user can read
the environments of own processes in /proc.

As a program (`python descendants.py MARK`) it waits for the end of its stdin, which comes with that
of the process that started it, and kills what has the mark.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

_PROC = "/proc"
_READ_BYTES = 1 << 16
_PREFIX = "FLEXQ_BENCH_STARTED_"
_START = b"\0" + _PREFIX.encode()
_MOST_KNOWN = 1 << 14  # processes of other programs
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
        pids = _marked((mark,), _processes())
        if not pids:
            return
        _signal(pids, signal.SIGKILL)


def stop_marked(marks: Sequence[str], besides: Iterable[int] = ()) -> set[int]:
    """Stop (SIGSTOP) the processes that `end_marked` would kill, and return their ids.

    marks: any of them. besides: ids of processes to leave running. Other programs' processes are
    looked at once: a turn of a comparison waits for this.
    """
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        pids = _marked(tuple(marks), _processes(), _others) - stopped - set(besides)
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


def _processes() -> frozenset[tuple[str, int]]:
    """Ids of all processes, each with a number that another process of the same id doesn't have."""
    with os.scandir(_PROC) as entries:
        return frozenset((e.name, e.inode()) for e in entries if e.name.isdecimal())


def _marked(
    marks: tuple[str, ...],
    processes: frozenset[tuple[str, int]],
    others: dict[tuple[str, int], int] | None = None,
) -> set[int]:
    """Ids of those that have a mark, and of their children.

    others: parents of processes that no program with marks started, which are not read again.
    """
    # A variable's name is at the start, or after the end of another one.
    starts = [b"\0" + mark.encode() + b"=" for mark in marks]
    own = os.getpid()
    known = {} if others is None else others
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for process in processes:
        pid = int(process[0])
        if process in known:
            parents[pid] = known[process]
            continue
        with suppress(OSError):  # the process has ended, or belongs to another user
            # The name of the program, in brackets, may contain any bytes.
            stat = _content(f"{_PROC}/{pid}/stat").rpartition(b")")[2]
            state, parent = stat.split(None, 2)[:2]
            if state in (b"Z", b"X"):
                continue
            parents[pid] = int(parent)
            environment = b"\0" + _content(f"{_PROC}/{pid}/environ")
            if any(start in environment for start in starts):
                pids.add(pid)
            # One that this process starts has our environment until it executes its program.
            elif (
                others is not None and own not in (pid, parents[pid]) and _START not in environment
            ):
                others[process] = parents[pid]
    if len(known) > _MOST_KNOWN:
        known.clear()
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {own}


_others: dict[tuple[str, int], int] = {}


def _content(path: str) -> bytes:
    """The bytes of a file, read as fast as possible: a turn of a comparison waits for it."""
    file = os.open(path, os.O_RDONLY)
    try:
        parts = [os.read(file, _READ_BYTES)]
        while len(parts[-1]) == _READ_BYTES:
            parts.append(os.read(file, _READ_BYTES))
    finally:
        os.close(file)
    return b"".join(parts)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
