"""The cache on disk: compiled kernels and tuned choices."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from kernels.errors import CacheError

_UNUSABLE = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


def cache_folder() -> Path:
    """$FLEXQ_BENCH_CACHE, else the user's cache folder of flexq-bench."""
    override = os.environ.get("FLEXQ_BENCH_CACHE")
    return Path(override) if override else platformdirs.user_cache_path("flexq-bench")


@contextmanager
def in_cache(folder: Path) -> Iterator[None]:
    """Make a folder of the cache, and raise CacheError where the block, or making it, can't write.

    A full disk stays the OSError that it is.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        raise CacheError(
            f"the cache folder {folder} can't be used: {(error.strerror or str(error)).lower()}: "
            "set FLEXQ_BENCH_CACHE to a folder that may be written"
        ) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Several processes may write the same file at once: each reader sees a whole one or none.

    Raises CacheError.
    """
    with in_cache(path.parent):
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
            handle.write(content)
        os.replace(handle.name, path)


@contextmanager
def only_process(path: Path) -> Iterator[None]:
    """One process on this machine is inside at a time; `path` is a lock file that stays empty.

    Whoever ends inside, however it ends, lets the next one in. Raises CacheError.
    """
    with in_cache(path.parent):
        handle = path.open("wb")
    with handle:  # closing it lets go of the lock
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
