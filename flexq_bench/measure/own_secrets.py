"""Protection of this process, which may know a token or a database's password, from code beside it.

Other processes of its user, and root's, could read its first environment in /proc, which a change
of `os.environ` does not reach, its memory and its open files.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexq_bench.measure.clean_environment import is_passed
from flexq_bench.repository.descendants import marks_in

_GET_DUMPABLE, _SET_DUMPABLE = 3, 4  # of prctl
# Start and end: fields of /proc/self/stat after the program's name (proc(5): 50, 51).
_ENVIRONMENT = slice(47, 49)


@contextmanager
def hidden_secrets() -> Iterator[None]:
    """Hide this process from others of its user while the block runs.

    Afterwards its first environment stays erased; `os.environ` and that of new processes don't
    change. Does nothing where there is no Linux.
    """
    if sys.platform != "linux":
        yield
        return
    _erase_first_environment()
    libc = ctypes.CDLL(None)
    before = libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_DUMPABLE, before, 0, 0, 0)


def _erase_first_environment() -> None:
    for name, value in os.environ.items():
        os.putenv(name, value)  # a copy elsewhere, to which the C library refers from now on
    # The name of the program, in brackets, may contain any bytes.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = map(int, fields[_ENVIRONMENT])
    position = start
    for variable in ctypes.string_at(start, end - start).split(b"\0"):
        name = os.fsdecode(variable.partition(b"=")[0])
        if not is_passed(name) and not marks_in([name]):
            ctypes.memset(position, 0, len(variable))
        position += len(variable) + 1
