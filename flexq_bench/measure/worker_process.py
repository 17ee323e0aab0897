"""A worker process: started in the folder whose code it runs, sent requests, always terminated.

A/B comparisons, decodes and builds of other revisions run in such processes. The other end is
`flexq_bench.measure.worker_server`.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from flexq_bench.errors import FlexqError, InfrastructureError
from flexq_bench.measure.launcher import FreshProcesses, Launcher
from flexq_bench.measure.worker_messages import (
    VERSION,
    count_values,
    decode,
    encode,
    odd_value,
    shown,
)
from flexq_bench.repository.descendants import (
    continue_stopped,
    end_marked,
    new_mark,
    stop_marked,
)

_READ_BYTES = 1 << 16
_GRACE_S = 5.0
_MAX_REPLY_BYTES = 1 << 24
_MAX_REPLY_VALUES = 1 << 20  # of which any is an object of this process
_MAX_LOG_BYTES = 1 << 28  # of what it writes to stderr
_ID_BITS = 52  # every JSON reader supports integers of this size
_MAX_SHOWN_CHARS = 500  # characters of the last line of a worker that died
# Who waits for a reply looks so often, and ends a worker that somebody else has stopped.
_LOOK_S, _MAX_LOOKS = 5.0, 4
_SHOWN_TEXTS = frozenset({"wrong", "error"})  # of a reply


def _scheduling(pid: int) -> dict[str, object]:
    """CPUs, priority and policy of a process (0: this one); empty: it ended, or no Linux."""
    try:
        return {
            "CPUs": os.sched_getaffinity(pid),
            "priority": os.getpriority(os.PRIO_PROCESS, pid),
            "scheduling policy": os.sched_getscheduler(pid),
        }
    except (OSError, AttributeError):
        return {}


def _worker_in(pid: int) -> int:
    """The process itself, or the first one of the sandbox that it is the outside of."""
    with suppress(OSError, ValueError, StopIteration):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            inner = int(child)
            if _namespaces(inner) > _namespaces(pid) or (inner := _worker_in(inner)) != int(child):
                return inner
    return pid


def waited_s(pid: int) -> float:
    """Seconds that a process's main thread waited for a CPU that others used; 0.0: not known."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _namespaces(pid: int) -> int:
    """Number of nested namespaces of processes that a process is in."""
    # Bytes: a process chooses its name, which may be no text or have ends of lines.
    lines = Path(f"/proc/{pid}/status").read_bytes().split(b"\n")
    return next(len(line.split()) - 1 for line in lines if line.startswith(b"NSpid:"))


def _is_stopped(pid: int | None) -> bool:
    """Return True if a process, or the first one of its sandbox, was stopped by a signal."""
    with suppress(OSError):
        if pid is not None:
            stat = Path(f"/proc/{_worker_in(pid)}/stat").read_bytes()
            return stat.rpartition(b")")[2].split()[0] == b"T"
    return False


@cache
def _own_scheduling() -> dict[str, object]:
    """`_scheduling` of this process when this was first called."""
    return _scheduling(0)


class WorkerError(InfrastructureError):
    """A worker did not start, died, hung, or broke; another one may succeed.

    reason: the message without the worker's name.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class RefusedError(FlexqError):
    """A worker cannot run this case; it continues with others.

    reason: as of WorkerError. is_unsupported: True if the kernel does not support the case.
    """

    def __init__(self, message: str, reason: str = "", *, is_unsupported: bool = False) -> None:
        super().__init__(message)
        self.reason, self.is_unsupported = reason or message, is_unsupported


@contextmanager
def read_as_reply(name: str) -> Iterator[None]:
    """Raise WorkerError for a reply of the worker of this name that a block can't read."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        raise WorkerError(f"{name} gave a reply that can't be read: {shown(str(error))}") from None


class _Reply(dict[str, Any]):
    """A worker's reply. A key that it left out is the worker's error, as a wrong message is."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._name = name

    def __missing__(self, key: str) -> Any:
        raise WorkerError(f"{self._name} gave a reply without {key!r}")


class WorkerProcess:
    """A worker in its own process group. A context manager that terminates it on leaving.

    Processes that the worker started are terminated too, even in other sessions
    (flexq_bench.repository.descendants).

    name: for messages. tree: the folder whose packages it imports. command: the command line.
    timeout_s: for each reply, after which it is killed; None: no limit. environment: all of its
    variables, with PYTHONPATH after the tree; None: ours. launcher: starts it; None: as a fresh
    process.
    """

    def __init__(
        self,
        name: str,
        tree: Path,
        command: Sequence[str],
        *,
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        _own_scheduling()
        self.name, self.tree = name, tree
        self.secret: int | None = None  # seed of its inputs; None: not known
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._mark = new_mark()
        self._request_id = 0  # id of the latest request; 0: none was sent
        self._operation = ""  # operation of the latest request
        self._unread = bytearray()
        self._stderr_start = 0  # bytes on stderr up to the latest reply
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = (launcher or FreshProcesses()).start(
            command,
            folder=tree,
            environment=variables_in(tree, environment) | {self._mark: "1"},
            stderr=self._log,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:  # also Ctrl-C: don't wait for the current request
            self.kill()
        self.close()

    def request_identity(self) -> None:
        """Send an A/B worker its first request, which makes it open the device."""
        with suppress(WorkerError):  # raised by `check_identity`, which finds no reply
            self.send("describe")

    def check_identity(self) -> dict[str, Any]:
        """Reply of an A/B worker to `request_identity` (WorkerOperations.describe).

        Raises WorkerError if it did not start, speaks another version, or imported other code than
        its tree's.
        """
        identity = self.receive()
        version = identity["version"]
        if version != VERSION:
            raise WorkerError(
                f"{self.name} speaks version {version} of the messages and this program "
                f"version {VERSION}: compare from a checkout that speaks the same"
            )
        if Path(identity["root"]) != (self.tree / "flexq_bench").resolve().parent:
            raise WorkerError(f"{self.name} ran the code of {identity['root']}, not of {self.tree}")
        if identity.get("takes_secret", False):
            self.reseed(secrets.randbits(_ID_BITS))
        return identity

    def reseed(self, secret: int) -> None:
        """Let an A/B worker draw the inputs that change between samples from a secret."""
        self.ask("reseed", secret=secret)
        self.secret = secret

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """The reply to one request; raises as `send` and `receive`."""
        self.send(what, **arguments)
        return self.receive()

    def allow(self, timeout_s: float | None, *, in_all: bool = False) -> None:
        """Set the time limit of each reply from now on; None: no limit.

        in_all: of all replies until the next call.
        """
        self._timeout_s = timeout_s
        is_limited = in_all and timeout_s is not None
        self._deadline = time.monotonic() + timeout_s if is_limited and timeout_s else None

    def send(self, what: str, **arguments: Any) -> None:
        """Send a request without waiting for its reply. Raises WorkerError if the worker died."""
        # Random, so that external code in the worker can't write a reply in advance.
        self._request_id = secrets.randbits(_ID_BITS) or 1
        self._operation = what
        message = {"id": self._request_id, "do": what, **arguments}
        try:
            self._write(encode(message))
        except OSError:
            raise WorkerError(self._exit_reason()) from None

    def receive(self) -> dict[str, Any]:
        """The next reply to the latest request.

        Raises RefusedError if the worker refuses, WorkerError if it fails, dies or hangs; the
        message names the worker.
        """
        answer = self._answer()
        reply = answer.get("reply")
        if isinstance(reply, dict):
            odd = odd_value(reply)
            if odd:
                raise WorkerError(f"{self.name} gave a reply with an odd {odd!r}")
            texts = {name: shown(str(reply[name])) for name in _SHOWN_TEXTS & reply.keys()}
            return _Reply(self.name, reply | texts)
        error = shown(str(answer.get("error", "an answer without a reply")))
        if answer.get("refused"):
            is_unsupported = bool(answer.get("unsupported"))
            raise RefusedError(f"{self.name}: {error}", error, is_unsupported=is_unsupported)
        raise WorkerError(f"{self.name}: {error}", error)

    @contextmanager
    def paused(self, others: Sequence[WorkerProcess] = ()) -> Iterator[None]:
        """Stop workers and their processes, so that they can't disturb another worker's turn.

        others: besides this one.
        """
        workers = [self, *others]
        for worker in workers:
            worker._process.signal_group(signal.SIGSTOP)
        marks, pids = zip(*((w._mark, w._process.pid) for w in workers), strict=True)
        elsewhere = stop_marked(marks, pids)
        try:
            yield
        finally:
            continue_stopped(elsewhere)
            for worker in workers:
                worker._process.signal_group(signal.SIGCONT)

    def rescheduled(self) -> str:
        """Describe changes of its CPUs or priority; empty: none.

        Any process of this user may change the CPUs and the priority of another, also of this one,
        which its next worker then inherits. It is therefore compared with this one as it was before
        its first worker.
        """
        now, before = _scheduling(self._process.pid), _own_scheduling()
        return " and ".join(what for what in now if now[what] != before.get(what))

    def run_on(self, cpus: Collection[int]) -> None:
        """Let its main thread run on these CPUs only, where the operating system allows that."""
        with suppress(OSError, AttributeError):
            os.sched_setaffinity(_worker_in(self._process.pid), cpus)

    def waited_s(self) -> float:
        """See the function of this name."""
        with suppress(ProcessLookupError):  # there is none
            return waited_s(_worker_in(self._process.pid))
        return 0.0

    def finish(self) -> None:
        """Tell the worker that no request follows, so that it ends; `close` waits for its end."""
        assert self._process.stdin is not None  # the process was created with a pipe
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the process and all processes that it started."""
        process = self._process
        if process.poll() is None:
            self.finish()  # a healthy worker ends here
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S if self._request_id else 0)
        self.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._log.close()

    def kill(self) -> None:
        """Kill it at once."""
        self._process.signal_group(signal.SIGKILL)
        end_marked(self._mark)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._line()
        try:
            answer = decode(line) if count_values(line) <= _MAX_REPLY_VALUES else {}
        except ValueError:
            answer = {}
        if answer.get("id") != self._request_id:
            self.kill()
            raise WorkerError(f"{self.name} answered {self._operation!r} with {line[:80]!r}")
        # Not when a request is sent: a worker that dies may have written its reason before.
        self._stderr_start = self._stderr_size()
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None  # the process was created with a pipe
        stdout = self._process.stdout.fileno()
        ready = self._ready(stdout, selectors.EVENT_READ)
        while b"\n" not in self._unread:
            next(ready)
            read = os.read(stdout, _READ_BYTES)
            if not read:
                raise WorkerError(self._exit_reason())
            self._unread += read
            if len(self._unread) > _MAX_REPLY_BYTES:
                self.kill()
                raise WorkerError(f"{self.name} answered {self._operation!r} without an end")
        line, _, self._unread = self._unread.partition(b"\n")
        return bytes(line)

    def _write(self, message: bytes) -> None:
        """Write to its pipe, which it may have made small, or filled, without ever reading it."""
        assert self._process.stdin is not None  # the process was created with a pipe
        stdin = self._process.stdin.fileno()
        ready = self._ready(stdin, selectors.EVENT_WRITE)
        while message:
            next(ready)
            message = message[os.write(stdin, message[: select.PIPE_BUF]) :]  # does not wait

    def _ready(self, pipe: int, event: int) -> Iterator[None]:
        """Wait for a pipe each time. Kills the worker, and raises WorkerError, at the time limit.

        Also if it stays stopped by a signal.
        """
        deadline = self._deadline
        if deadline is None and self._timeout_s is not None:
            deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            looks = 0  # since it was stopped
            while True:
                remaining_s = _LOOK_S if deadline is None else deadline - time.monotonic()
                floods = self._stderr_size() > _MAX_LOG_BYTES
                if remaining_s <= 0 or looks >= _MAX_LOOKS or floods:
                    self.kill()
                    how = f"was stopped by a signal at {self._operation!r}"
                    if floods:
                        how = f"wrote over {_MAX_LOG_BYTES >> 20} MiB to stderr"
                    elif remaining_s <= 0:
                        how = f"gave no answer to {self._operation!r} in {self._timeout_s:g} s"
                    raise WorkerError(f"{self.name} {how} and was ended")
                if selector.select(min(remaining_s, _LOOK_S)):
                    looks = 0
                    yield
                elif self._process.poll() is not None:  # what it started may hold its pipes
                    raise WorkerError(self._exit_reason())
                else:
                    looks = looks + 1 if _is_stopped(self._process.known_pid) else 0

    def _exit_reason(self) -> str:
        """Describe how the process ended, at which request, and its last line on stderr."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        how = self._process.exit_reason() or "it closed the pipe of its replies"
        start, written = max(self._stderr_start, self._stderr_size() - _READ_BYTES), b""
        with suppress(OSError):  # it may change the file, its end, and how it is read, at any time
            written = os.pread(self._log.fileno(), _READ_BYTES, start)
        lines = written.decode(errors="replace").strip().splitlines()
        last = f": {shown(lines[-1].strip())[:_MAX_SHOWN_CHARS]}" if lines else ""
        return f"{self.name} died ({how}) at {self._operation!r}{last}"

    def _stderr_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size


def variables_in(tree: Path, environment: Mapping[str, str] | None) -> dict[str, str]:
    """All variables of a worker in a tree. environment: see WorkerProcess."""
    from flexq_bench.db.urls import (
        ENVIRONMENT_VARIABLE,  # here, because a worker needs no SQLAlchemy
    )

    variables = os.environ if environment is None else environment
    python_path = variables.get("PYTHONPATH")
    path = os.pathsep.join([str(tree), python_path] if python_path else [str(tree)])
    # The result is stored, and a URL may have a password.
    return {k: v for k, v in variables.items() if k != ENVIRONMENT_VARIABLE} | {"PYTHONPATH": path}
