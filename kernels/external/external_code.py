"""Values that imported external code declares, known while its module is executed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_imports: list[None] = []  # one entry for each import in progress
# A module's list of values declared while its body was executed, assigned or not.
DECLARED = "__flexq_bench_kernels__"


@contextmanager
def importing() -> Iterator[None]:
    """Context for the import of external modules."""
    _imports.append(None)
    try:
        yield
    finally:
        _imports.pop()


def note_declared(value: object) -> None:
    """Add a value declared by imported code to DECLARED of the module being executed."""
    if not _imports:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is not None:
        frame.f_globals.setdefault(DECLARED, []).append(value)
