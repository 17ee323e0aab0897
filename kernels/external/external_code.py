"""External code that this process imports: its locations, and functions to call before it runs."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

# Python and this program may be below the folder of a file of kernels, for example a home folder.
_OWN = (
    Path(sysconfig.get_path("stdlib")),
    Path(__file__).parents[2],
)
_places: set[Path] = set()
_calls: dict[Callable[[], object], None] = {}
_imports: list[None] = []  # one entry for each import in progress
# A module's list of values declared while its body was executed, assigned or not.
DECLARED = "__flexq_bench_kernels__"


def before_import(call: Callable[[], object]) -> None:
    """Register a function to call before installed packages with kernels are imported."""
    _calls[call] = None


def notify_before_import() -> None:
    for call in list(_calls):  # a call may import a module that registers another one
        call()


@contextmanager
def importing() -> Iterator[None]:
    """Context for the import of external modules, possibly started by a module of a known place."""
    _imports.append(None)
    try:
        yield
    finally:
        _imports.pop()


def is_importing() -> bool:
    return bool(_imports)


def note_declared(value: object) -> None:
    """Add a value declared by imported code to DECLARED of the module being executed."""
    if not is_importing():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is not None:
        frame.f_globals.setdefault(DECLARED, []).append(value)


def add_place(place: Path) -> None:
    """Register a file, or a folder of files, as external code."""
    # code objects have the path by which they were imported
    _places.update((place.absolute(), place.resolve()))
    is_external.cache_clear()


@cache
def is_external(file: str) -> bool:
    """Return True if a file belongs to registered external code.

    Files of the standard library, of this program, or in a site-packages folder below a registered
    place do not.
    """
    path = Path(file)
    return any(_lies_in(path, place) for place in _places) and not any(
        _lies_in(path, own) for own in _OWN
    )


def _lies_in(path: Path, place: Path) -> bool:
    return path.is_relative_to(place) and "site-packages" not in path.relative_to(place).parts
