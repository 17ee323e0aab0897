"""The process that owns a run, and checks whether it is still alive."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from flexq_bench.db.records import RunOwner

_PROC = Path("/proc")
# Index of the 22nd field of /proc/PID/stat, counted after the program's name: the name may contain
# any character.
_START_FIELD = 19


@cache
def _pid_scope() -> str:
    """The boot id and PID namespace, within which a PID identifies a process; empty: unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def this_process() -> RunOwner:
    """This process as the owner of a run."""
    return RunOwner(platform.node(), os.getpid(), f"{_pid_scope()} {_start_ticks(os.getpid())}")


def is_alive(owner: RunOwner) -> bool:
    """Return True if the owner certainly runs in this PID namespace of this host."""
    return (
        owner.host == platform.node() and owner.start == f"{_pid_scope()} {_start_ticks(owner.pid)}"
    )


def is_dead(owner: RunOwner) -> bool:
    """Return True if the owner has certainly ended.

    False for other hosts, and for other containers since the same boot.
    """
    boot, _, rest = owner.start.partition(" ")
    namespace, _, ticks = rest.partition(" ")
    if owner.host != platform.node() or not _pid_scope() or not ticks:
        return False
    own_boot, _, own_namespace = _pid_scope().partition(" ")
    if boot != own_boot:
        return True
    return namespace == own_namespace and _start_ticks(owner.pid) != ticks


def _start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty: no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    is_zombie = fields[0] in "ZX"
    return "" if is_zombie else fields[_START_FIELD]
