"""Processes that a process started, found wherever they went, and stopped or ended.

A process group ends with one signal, but who starts a session of its own leaves it, and whose
parent ends is adopted by init. Environments are inherited: a variable with a name drawn at random
marks all descendants, whose environments Linux shows their user in /proc.
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
_ROUNDS = 20  # a process may start another between a look and its end


def new_mark() -> str:
    """The name of a variable to start a process with, whose descendants are to end with it."""
    return _PREFIX + secrets.token_hex(8)


def end_marked(mark: str) -> None:
    """End all processes of ours whose environment has the mark, and what they started.

    One that starts another with an emptied environment and ends before this is not found: an
    unprivileged process can't follow it. Does nothing where there is no /proc.
    """
    for _ in range(_ROUNDS):
        pids = _marked(mark.encode() + b"=")
        if not pids:
            return
        _signal(pids, signal.SIGKILL)


def stop_marked(mark: str, besides: Iterable[int] = ()) -> set[int]:
    """Stop all processes that `end_marked` would end but those of `besides`; the process ids."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        pids = _marked(mark.encode() + b"=") - stopped - set(besides)
        if not pids:
            break
        _signal(pids, signal.SIGSTOP)
        stopped |= pids
    return stopped


def continue_stopped(pids: Iterable[int]) -> None:
    """Let processes that `stop_marked` stopped go on."""
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
        with suppress(OSError):  # ended meanwhile, or another user's
            # The name of the program, in brackets, may have any bytes.
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
