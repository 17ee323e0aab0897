"""The cache on disk: compiled kernels and tuning results."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from flexq_bench.kernels.errors import CacheError

_MAX_READ_BYTES = 1 << 28
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
    """Return $FLEXQ_BENCH_CACHE, else flexq-bench's folder in the user's cache folder."""
    override = os.environ.get("FLEXQ_BENCH_CACHE")
    return Path(override) if override else platformdirs.user_cache_path("flexq-bench")


@contextmanager
def in_cache(folder: Path) -> Iterator[None]:
    """Create a folder of the cache; convert an OSError of it or of the block to CacheError.

    Only errors of paths and permissions are converted; others, such as a full disk, pass through.
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


def read_regular(path: Path, most: int = _MAX_READ_BYTES, *, follow: bool = True) -> bytes:
    """Read the beginning of a file that external code may have put there.

    follow: also through a link. Raises OSError if it is none: a pipe would block the reader, and a
    device might never end.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(most)


def remove_tree(folder: Path) -> None:
    """Remove a folder that external code may have filled to any depth. Errors are ignored."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder for external code."""
    folder = Path(tempfile.mkdtemp(prefix="flexq-bench-"))
    try:
        yield folder
    finally:
        remove_tree(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by renaming a temporary one: a reader sees the complete file or none.

    Several processes may write the same file at once. Raises CacheError.
    """
    with in_cache(path.parent):
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
            handle.write(content)
        os.replace(handle.name, path)


@contextmanager
def only_process(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among the processes of this machine; `path` is the empty lock file.

    The lock is released when the block or its process ends. Raises CacheError.
    """
    with in_cache(path.parent):
        handle = path.open("wb")
    with handle:  # closing it releases the lock
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
