"""The process that owns a run, and whether it is still there."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from db.records import RunOwner

_PROC = Path("/proc")
# Of /proc/PID/stat behind the program's name, which may hold anything: the 22nd field of all.
_START_FIELD = 19


@cache
def _here() -> str:
    """This boot of this machine and its namespace of process ids: where a pid means something."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def this_process() -> RunOwner:
    """The owner of what this process runs."""
    return RunOwner(platform.node(), os.getpid(), f"{_here()} {_ticks(os.getpid())}")


def is_alive(owner: RunOwner) -> bool:
    """Return True if the owner certainly runs, in this PID namespace of this host."""
    return owner.host == platform.node() and owner.start == f"{_here()} {_ticks(owner.pid)}"


def is_dead(owner: RunOwner) -> bool:
    """Return True if the owner has certainly ended. Always False for another host, and for another
    container of the same boot."""
    boot, _, rest = owner.start.partition(" ")
    namespace, _, ticks = rest.partition(" ")
    if owner.host != platform.node() or not _here() or not ticks:
        return False
    here_boot, _, here_namespace = _here().partition(" ")
    if boot != here_boot:
        return True
    return namespace == here_namespace and _ticks(owner.pid) != ticks


def _ticks(pid: int) -> str:
    """Return the start of a process in clock ticks since the boot; empty: there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    is_zombie = fields[0] in "ZX"
    return "" if is_zombie else fields[_START_FIELD]
