"""The cache on disk: compiled kernels and tuned choices."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """$FLEXQ_BENCH_CACHE, else the user's cache folder of flexq-bench."""
    override = os.environ.get("FLEXQ_BENCH_CACHE")
    return Path(override) if override else platformdirs.user_cache_path("flexq-bench")


def write_atomically(path: Path, content: bytes) -> None:
    """Several processes may write the same file at once: each reader sees a whole one or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
        handle.write(content)
    os.replace(handle.name, path)


@contextmanager
def only_process(path: Path) -> Iterator[None]:
    """One process on this machine is inside at a time; `path` is a lock file that stays empty.

    Whoever ends inside, however it ends, lets the next one in.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as handle:  # closing it lets go of the lock
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
