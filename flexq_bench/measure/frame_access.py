"""Detection of kernel code that reads the frames or objects of the measuring process.

Expected results are in that process: code that reads its stack could copy them instead of computing
them. Python reports such reads as audit events. A gate does not rely on this: it judges results in
another process (`flexq_bench.measure.ab.judged_sides`).
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from types import CodeType, FrameType

from flexq_bench.kernels.external.external_code import is_external, is_importing

_READS = (
    *("sys._getframe", "sys._current_frames", "sys._current_exceptions"),
    *("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback"),
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
)
_GETS_FRAMES = "sys.addaudithook"  # the hook gets the frames that any other code reads
_ATTRIBUTES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_MEMORY = re.compile("/proc/.*/(mem|s?maps)")  # memory of a process or a thread, and its map
# of the standard library: they read on behalf of their caller
_BETWEEN = ("inspect.py", "traceback.py")

_GIVES_FRAMES = ("currentframe", "<lambda>")  # function names; logging has the first as a lambda


class _Reads:
    """is_on: True while reads are recorded. first: the first read since then; empty: none."""

    is_on = False
    first = ""


def listen() -> None:
    """Record reads by foreign code from now on."""
    _add_hook()
    _Reads.is_on, _Reads.first = True, ""


def forget() -> None:
    """Stop recording, and forget earlier reads."""
    _Reads.is_on, _Reads.first = False, ""


def detected() -> str:
    """Describe the first read of this process by foreign code; empty: none."""
    if not _Reads.first:
        return ""
    return f"its code read what measures it ({_Reads.first}): its results are not believed"


@cache
def _add_hook() -> None:
    sys.addaudithook(_record)  # cannot be removed before the process ends


def _record(event: str, arguments: tuple[object, ...]) -> None:
    # Called for every audit event of the process: nothing may be slow or raise. Reads during
    # imports do not count, because decorators inspect their functions.
    if not _Reads.is_on or _Reads.first:
        return
    if is_importing():
        _Reads.first = event if event == _GETS_FRAMES else ""  # it stays
        return
    what = _what(event, arguments)
    if not what:
        return
    _Reads.is_on = False  # the next line is itself such a read
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (foreign := is_external(frame.f_code.co_filename)):
        if not _is_between(frame.f_code):
            break
        frame = frame.f_back
    if frame is not None and foreign:
        _Reads.first = what
    _Reads.is_on = True


def _what(event: str, arguments: tuple[object, ...]) -> str:
    if event in _READS or event == _GETS_FRAMES:
        return event
    if event == "object.__getattr__" and arguments[-1] in _ATTRIBUTES:
        return str(arguments[-1])
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        return _memory(os.fsdecode(arguments[0]))
    return ""


def _memory(path: str) -> str:
    """The path, if it leads to a process's memory or memory map; otherwise empty."""
    try:
        return path if _MEMORY.fullmatch(os.path.realpath(path)) else ""
    except (OSError, ValueError):  # not a path that can be opened
        return ""


def _is_between(code: CodeType) -> bool:
    """Return True if the code reads on behalf of its caller.

    That is inspect, traceback, a `currentframe` of any library, or code without a file.
    """
    name = code.co_filename
    return name.startswith("<") or name.endswith(_BETWEEN) or code.co_name in _GIVES_FRAMES
