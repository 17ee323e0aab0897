"""One measuring process per device at a time, across the processes and users of a host.

The lock is flock's on a file in a world-writable folder; the operating system releases it when its
process ends. Containers that share a GPU but no such folder need $FLEXQ_BENCH_LOCKS: a folder that
they share, created if necessary.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flexq_bench.errors import InfrastructureError

MAX_WAIT_S = 600.0  # for the previous process to end
_LOG_INTERVAL_S = 30.0
_POLL_INTERVAL_S = 0.2
_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EACCES)

log = logging.getLogger(__name__)


@contextmanager
def device_alone(uuid: str, *, shared: bool = False, wait_s: float = MAX_WAIT_S) -> Iterator[None]:
    """Hold a device, identified by a GPU's or a CPU's uuid, for the duration of the block.

    shared: allow other holders that also set it, as the workers on one CPU do. While waiting, the
    log names the holder every half minute. Raises InfrastructureError if the device isn't free
    after wait_s seconds, or if the lock's file is not one of ours.
    """
    path = _folder() / f"flexq-bench-{hashlib.sha256(uuid.encode()).hexdigest()[:32]}.lock"
    handle = _open(path)
    try:
        _wait(handle, uuid, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_s)
        yield
    finally:
        os.close(handle)  # releases the lock


@contextmanager
def devices_alone(
    uuids: Iterable[str], *, shared: bool = False, wait_s: float = MAX_WAIT_S
) -> Iterator[None]:
    """Hold several devices. All processes take them in the same order, so none waits in a circle.

    Raises as device_alone.
    """
    with ExitStack() as held:
        for uuid in sorted(set(uuids)):
            held.enter_context(device_alone(uuid, shared=shared, wait_s=wait_s))
        yield


def _folder() -> Path:
    override = os.environ.get("FLEXQ_BENCH_LOCKS")
    if override:
        return Path(override)
    return next((folder for folder in _FOLDERS if os.access(folder, os.W_OK)), _FOLDERS[-1])


def _open(path: Path) -> int:
    """The lock's file, created if necessary. Read permission is enough for a lock."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        try:
            handle = os.open(path, flags)
        except FileNotFoundError:
            # O_CREAT is refused for another user's file in such a folder, so it is used only if
            # there is none.
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(handle, 0o644)  # for any umask: others must be able to read it
            except FileExistsError:
                handle = os.open(path, flags)
    except OSError as error:
        raise InfrastructureError(
            f"{path} can't be opened to hold the device ({error.strerror}): remove it, or name "
            "another folder with FLEXQ_BENCH_LOCKS"
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InfrastructureError(f"{path} is no plain file: remove it")
    return handle


def _wait(handle: int, uuid: str, kind: int, wait_s: float) -> None:
    begun = logged_at = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _LOCKED_ERRORS:
                raise InfrastructureError(f"device {uuid} can't be held: {error}") from error
        waited = time.monotonic() - begun
        if waited >= wait_s:
            raise InfrastructureError(
                f"{_holder(handle)} measures on device {uuid}: wait for its end, or pick another "
                f"device (waited {waited:.0f} s)"
            )
        if waited == 0 or time.monotonic() - logged_at >= _LOG_INTERVAL_S or logged_at == begun:
            logged_at = time.monotonic()
            log.warning("%s measures on device %s: waiting for its end", _holder(handle), uuid)
        time.sleep(min(_POLL_INTERVAL_S, max(wait_s - waited, 0.001)))


def _holder(handle: int) -> str:
    """Name the process that holds the lock, as the operating system reports it."""
    inode = f":{os.fstat(handle).st_ino}"
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split()
        if "->" not in fields and fields[1] == "FLOCK" and fields[5].endswith(inode):
            return f"process {fields[4]}"
    return "another process"
