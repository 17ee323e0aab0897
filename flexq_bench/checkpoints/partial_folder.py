"""The hidden folder beside a checkpoint in which it is written, locked while its process lives."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from pathlib import Path


class PartialFolder:
    """A new folder `.NAME.partial-PID` beside `folder`; those of processes that died are removed.

    The lock is of the kernel, so that it ends with the process, however that ends. A file system
    without locks keeps what is there. Raises OSError if the folder can't be made.
    """

    def __init__(self, folder: Path) -> None:
        _remove_abandoned(folder)
        self.path = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        _locked(self._lock)

    def remove(self) -> None:
        """Remove what is still there, and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _locked(descriptor):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
