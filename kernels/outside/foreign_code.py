"""Code of others that this process imports: where it lies, and who is called before it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_places: set[Path] = set()
_calls: dict[Callable[[], object], None] = {}


def before_import(call: Callable[[], object]) -> None:
    """Call this before installed packages with kernels are imported."""
    _calls[call] = None


def about_to_import() -> None:
    for call in _calls:
        call()


def add_place(place: Path) -> None:
    """Know a file, or a folder of files, as code of others."""
    _places.add(place.resolve())


def is_foreign(file: Path) -> bool:
    """Whether a file is known as code of others; a virtual environment beside it is not."""
    return any(
        file == place
        or (file.is_relative_to(place) and "site-packages" not in file.relative_to(place).parts)
        for place in _places
    )
