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
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

_PROC = "/proc"
_READ_BYTES = 1 << 16
_PREFIX = "FLEXQ_BENCH_STARTED_"
_MARK = re.compile(rb"\0(" + _PREFIX.encode() + rb"[0-9a-f]+)=")  # also at the start
_SETTLES_S = 1.0
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

    marks: any of them. besides: ids of processes to leave running. A process is read in its first
    second only: a turn of a comparison waits for this.
    """
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        pids = _marked(marks, _processes(), _known) - stopped - set(besides)
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


@dataclass(slots=True)
class _Seen:
    """Facts about a process, by its first reads.

    marks: in its environment. settles: time (of `time.monotonic`) from which it is not read again:
    one that starts has another environment until it executes its program, or takes its own mark.
    """

    settles: float
    parent: int = 0
    marks: frozenset[bytes] = frozenset()


_Known = dict[tuple[str, int], _Seen]
_known: _Known = {}


def _marked(
    marks: Iterable[str], processes: frozenset[tuple[str, int]], known: _Known | None = None
) -> set[int]:
    """Ids of those that have a mark, and of their children. known: of earlier calls."""
    wanted = {mark.encode() for mark in marks}
    known = {} if known is None else known
    for process in known.keys() - processes:
        del known[process]
    now = time.monotonic()
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for process in processes:
        seen = known.setdefault(process, _Seen(now + _SETTLES_S))
        if now >= seen.settles or _is_read(process[0], seen):
            pid = int(process[0])
            parents[pid] = seen.parent
            if not wanted.isdisjoint(seen.marks):
                pids.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {os.getpid()}


def _is_read(name: str, seen: _Seen) -> bool:
    """Add what there is to know of a process. Return False if it ended."""
    try:
        # The name of the program, in brackets, may contain any bytes.
        state, parent = _content(f"{_PROC}/{name}/stat").rpartition(b")")[2].split(None, 2)[:2]
    except OSError:
        return False
    seen.parent = int(parent)
    with suppress(OSError):  # it belongs to another user
        seen.marks |= frozenset(_MARK.findall(b"\0" + _content(f"{_PROC}/{name}/environ")))
    return state not in (b"Z", b"X")


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
