"""Detection of changes of the files that both sides of a comparison run from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_State = tuple[int, int, int, int]


class UnchangedFiles:
    """The files in these folders, as they are when this is created.

    Times of a file's last change are compared, which only a new clock of the system can put back:
    a file that was changed and restored is found, too. Cached bytecode counts: it is run.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._states = dict(self._now())

    def first_changed(self) -> str:
        """Path of the first file that was changed, added or removed; empty: none."""
        try:
            now = dict(self._now())
        except RecursionError:  # folders in folders, without an end
            return str(self._folders[0])
        if now == self._states:
            return ""
        paths = sorted(now.keys() | self._states.keys())
        return next(path for path in paths if now.get(path) != self._states.get(path))

    def _now(self) -> Iterator[tuple[str, _State]]:
        for top in self._folders:
            for folder, _, names in os.walk(top):
                for path in (folder, *(os.path.join(folder, name) for name in names)):
                    status = os.lstat(path)
                    yield (
                        path,
                        (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns),
                    )
