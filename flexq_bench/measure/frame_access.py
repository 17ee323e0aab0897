"""Code of a kernel that reads the frames or objects of the process that measures it.

Expected results lie in that process: who reads its stack could copy them in place of computing
them. Python tells of such reads by audit events. A gate does not rely on it: it judges from
another process (`flexq_bench.measure.ab.judged_sides`).
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from types import CodeType, FrameType

from kernels.outside.foreign_code import is_foreign, is_importing

_READS = (
    *("sys._getframe", "sys._current_frames", "sys._current_exceptions"),
    *("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback"),
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
)
_ATTRIBUTES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_MEMORY = re.compile("/proc/.*/(mem|s?maps)")  # of a process or a thread; where it lies
_BETWEEN = ("inspect.py", "traceback.py")  # of the standard library: they read for who calls them

_GIVES_FRAMES = ("currentframe", "<lambda>")  # functions; logging has the first as a lambda


class _Reads:
    """is_on: whether anybody listens. first: the first read since then; empty: there was none."""

    is_on = False
    first = ""


def listen() -> None:
    """Note reads by code of others from now on."""
    _add_hook()
    _Reads.is_on, _Reads.first = True, ""


def forget() -> None:
    """Listen no more, and know of no read."""
    _Reads.is_on, _Reads.first = False, ""


def found() -> str:
    """Describe the first read of this process by foreign code; empty: there was none."""
    if not _Reads.first:
        return ""
    return f"its code read what measures it ({_Reads.first}): its results are not believed"


@cache
def _add_hook() -> None:
    sys.addaudithook(_hear)  # stays as long as the process


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    # Called for every event of the process: nothing may be slow or raise.
    # What is read while code is imported is not counted: decorators look at who they decorate.
    if not _Reads.is_on or _Reads.first or is_importing():
        return
    what = _what(event, arguments)
    if not what:
        return
    _Reads.is_on = False  # the next line is such a read
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (foreign := is_foreign(frame.f_code.co_filename)):
        if not _is_between(frame.f_code):
            break
        frame = frame.f_back
    if frame is not None and foreign:
        _Reads.first = what
    _Reads.is_on = True


def _what(event: str, arguments: tuple[object, ...]) -> str:
    if event in _READS:
        return event
    if event == "object.__getattr__" and arguments[-1] in _ATTRIBUTES:
        return str(arguments[-1])
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        return _memory(os.fsdecode(arguments[0]))
    return ""


def _memory(path: str) -> str:
    """The path, if the file that it leads to is a process's memory or tells of it; else empty."""
    try:
        return path if _MEMORY.fullmatch(os.path.realpath(path)) else ""
    except (OSError, ValueError):  # nothing that can be opened
        return ""


def _is_between(code: CodeType) -> bool:
    """Return True if the code reads for its caller.

    That is inspect, traceback, a `currentframe` of any library, or code without a file.
    """
    name = code.co_filename
    return name.startswith("<") or name.endswith(_BETWEEN) or code.co_name in _GIVES_FRAMES
