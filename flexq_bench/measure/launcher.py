"""Start of worker processes: each with a new interpreter, or forked from a server."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol, Self

from flexq_bench.measure.clean_environment import installed_on_python_path
from flexq_bench.repository.descendants import end_marked, marks_in, new_mark

# Of our own kernels, which take a second to import.
OWN_LIBRARIES = ("nvmath.bindings.cublasLt", "nvmath.bindings.cublas")
_SERVER = Path(__file__).with_name("fork_server.py")
_END_S = 10.0  # for the end of a process that was killed, and of all that it started
_DEATH_S = 1.0  # between the end of a server's sockets and its own
_MESSAGE_BYTES = 1 << 12
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_MAX_SHOWN_CHARS = 200  # characters of the last line of a server that died


log = logging.getLogger(__name__)


class Process(Protocol):
    """A started process, as `subprocess.Popen` describes it: the part that workers need.

    pid: as this process sees it; also the id of its group and session. Raises ProcessLookupError if
    the process was never created. stdin, stdout: pipes.
    """

    @property
    def pid(self) -> int: ...

    @property
    def known_pid(self) -> int | None:
        """Its id; None: a fork server has not said it yet, for which `pid` waits."""
        ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and its group. Does nothing if it ended."""
        ...

    def exit_reason(self) -> str:
        """Describe how it ended; empty: it runs."""
        ...


class Launcher(Protocol):
    """A way to start processes."""

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        stderr: IO[bytes],
    ) -> Process:
        """Start a command in a session of its own, with pipes for stdin and stdout.

        folder: its working directory. environment: all of its variables. Raises OSError if it
        can't be started.
        """
        ...


class FreshProcess(subprocess.Popen[bytes]):
    """A process with a new interpreter."""

    @property
    def known_pid(self) -> int | None:
        return self.pid

    def signal_group(self, number: int) -> None:
        _signal_group(self.pid, number)

    def exit_reason(self) -> str:
        return _exit_reason(self.poll())


class FreshProcesses:
    """Starts each process with a new interpreter.

    wrap: changes the command line, for example to run it in a sandbox.
    """

    def __init__(self, wrap: Callable[[Sequence[str]], Sequence[str]] = tuple) -> None:
        self._wrap = wrap

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        stderr: IO[bytes],
    ) -> Process:
        return FreshProcess(
            list(self._wrap(command)),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches only us: we end the process in good order
        )


class ForkServer:
    """Forks processes from a server that has imported their dependencies; a context manager.

    The server starts with the first process, and again after its death. It runs none of the code
    that its processes run, so that one of them can't affect another (see
    flexq_bench.measure.fork_server). Only on Linux: see `forking_launcher`.

    program: folder of trusted code, of which the server imports what the module of its first
    process imports; None: it imports only dependencies. wrap: changes the server's command line,
    for example to run it in a sandbox; stdin and stderr must stay as they are. libraries: of
    kernels, that it imports as well.
    """

    def __init__(
        self,
        program: Path | None = None,
        wrap: Callable[[Sequence[str]], Sequence[str]] = tuple,
        libraries: Sequence[str] = (),
    ) -> None:
        self._program, self._wrap, self._libraries = program, wrap, libraries
        self._mark, self._replaced_mark = new_mark(), new_mark()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `__exit__`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.end()
        self._log.close()

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        stderr: IO[bytes],
    ) -> Process:
        """See `Launcher`. Returns at once, also while the server still imports."""
        mark = next(iter(marks_in(environment)), new_mark())
        variables = {**environment, self._mark: "1"}
        control = self._connection({k: v for k, v in variables.items() if k != mark})
        (stdin, our_stdin), (our_stdout, stdout) = os.pipe(), os.pipe()
        ours, status = _status_sockets()
        request = {
            "command": list(command),
            "folder": str(folder),
            "environment": variables,
            "mark": mark,
        }
        _request(control, request, [stdin, stdout, stderr.fileno(), status.fileno()])
        for file in (stdin, stdout):
            os.close(file)
        status.close()
        pipes = (os.fdopen(our_stdin, "wb"), os.fdopen(our_stdout, "rb"))
        return ForkedProcess(self, command, pipes, ours)

    def begin(self, module: str, environment: Mapping[str, str]) -> None:
        """Start the server now, so that it imports what the processes of a module need.

        environment: as theirs. Returns at once.
        """
        variables = {**environment, self._mark: "1"}
        _request(self._connection(variables), {"module": module, "environment": variables}, [])

    def reset(self, folders: Iterable[Path] = (), caches: Iterable[Path] = ()) -> None:
        """End all processes of the server, also orphans, and empty folders that it sees.

        caches: folders in these, whose files are kept as they were when there were first any: what
        a later process writes there is lost.
        """
        if self._control is None:
            return
        ours, status = _status_sockets()
        request = {"empty": list(map(str, folders)), "caches": list(map(str, caches))}
        _request(self._control, request, [status.fileno()])
        status.close()
        with ours:
            if not select.select([ours], [], [], _END_S)[0] or not ours.recv(_MESSAGE_BYTES):
                self.end()  # it hangs, or could not empty them: the next process starts another

    def finish(self) -> None:
        """Tell the server that no request follows, so that it ends; `end` waits for its end."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def end(self) -> None:
        """End the server and all of its processes."""
        self.finish()
        if self._server is not None:
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(_END_S)
            self._server.kill()
            self._server.wait()
            self._server = None
        end_marked(self._mark)

    def death(self) -> str:
        """Describe the end of the server, with its last line on stderr."""
        if self._server is None:
            return "its fork server was ended"
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(_DEATH_S)
        how = _exit_reason(self._server.poll())
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()[:_MAX_SHOWN_CHARS]}" if lines else ""
        return f"its fork server ended, {how or 'it hung'}{last}"

    def _connection(self, environment: Mapping[str, str]) -> socket.socket:
        if self._server is not None and self._server.poll() is not None:
            self.end()
        if self._control is None:
            self._control, control = socket.socketpair()
            with control:
                program = "" if self._program is None else str(self._program)
                options = (self._replaced_mark, program, *self._libraries)
                command = (sys.executable, str(_SERVER), *options)
                self._server = subprocess.Popen(
                    list(self._wrap(command)),
                    env=_server_variables(environment) | {self._replaced_mark: "1"},
                    stdin=control.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._log,
                    start_new_session=True,
                )
        return self._control


class ForkedProcess:
    """A process that a fork server starts; until it exists, the server may still be importing."""

    def __init__(
        self,
        server: ForkServer,
        command: Sequence[str],
        pipes: tuple[IO[bytes], IO[bytes]],
        status: socket.socket,
    ) -> None:
        self.stdin, self.stdout = pipes
        self.returncode: int | None = None
        self._server, self._command = server, tuple(command)
        self._status = status
        self._pid: int | None = None
        self._failure = ""  # why there is none, or why its end is not known
        self._killed_at: float | None = None

    @property
    def pid(self) -> int:
        while self._pid is None and self.returncode is None:
            self._read(None)
        if self._pid is None:
            raise ProcessLookupError(self._failure)
        return self._pid

    @property
    def known_pid(self) -> int | None:
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        while self.returncode is None and self._read(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See subprocess.Popen. All processes that it started have then ended, too."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            until = [at for at in (deadline, self._killed_at) if at is not None]
            left = max(min(until) - time.monotonic(), 0.0) if until else None
            if self._read(left) or left is None:
                continue
            if self._killed_at is not None and time.monotonic() >= self._killed_at:
                self._end(-signal.SIGKILL, "its fork server did not report its end")
            elif deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return self.returncode

    def signal_group(self, number: int) -> None:
        if number == signal.SIGKILL and self._killed_at is None:
            self._killed_at = time.monotonic() + _END_S
            is_begun = self._pid is not None or self.returncode is not None
            if not is_begun and not self._read(0.0):
                # The process that the server may still create ends when it finds no reader.
                self._end(-signal.SIGKILL, "it was ended before it started")
        with suppress(ProcessLookupError):
            _signal_group(self.pid, number)

    def exit_reason(self) -> str:
        return self._failure or _exit_reason(self.poll())

    def _read(self, timeout: float | None) -> bool:
        """Read a message of the server. Return False if none came in time."""
        if not select.select([self._status], [], [], timeout)[0]:
            return False
        message, ancillary, _, _ = self._status.recvmsg(
            _MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
        )
        what, _, detail = message.decode(errors="replace").partition(" ")
        if what == "+":
            self._pid = _sender(ancillary)
            if detail:
                log.debug("process %d has a new interpreter: %s", self._pid, detail)
        elif what == "exit":
            self._end(int(detail))
        elif what == "error":
            self._end(-signal.SIGKILL, f"its fork server can't start it: {detail}")
        else:
            self._end(-signal.SIGKILL, self._server.death())
        return True

    def _end(self, returncode: int, failure: str = "") -> None:
        self.returncode, self._failure = returncode, failure
        self._status.close()


@contextmanager
def forking_launcher(
    program: Path | None = None,
    wrap: Callable[[Sequence[str]], Sequence[str]] = tuple,
    *,
    libraries: Sequence[str] = (),
    begin: tuple[str, Mapping[str, str]] | None = None,
) -> Iterator[Launcher]:
    """A ForkServer where the operating system has what it needs; else fresh processes.

    begin: module and environment of processes, with which the server starts at once; None: with the
    first process.
    """
    if sys.platform != "linux":
        yield FreshProcesses(wrap)
        return
    with ForkServer(program, wrap, libraries) as server:
        if begin is not None:
            server.begin(*begin)
        yield server


def _server_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a server: those of its processes, without folders of code under test."""
    python_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    installed = [name for name in installed_on_python_path() if name in python_path]
    others = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    return others | ({"PYTHONPATH": os.pathsep.join(installed)} if installed else {})


def _status_sockets() -> tuple[socket.socket, socket.socket]:
    """A pair of sockets: for reading messages with the ids of their senders, and for writing."""
    ours, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, status


def _request(control: socket.socket, request: Mapping[str, object], files: list[int]) -> None:
    line = json.dumps(request).encode() + b"\n"
    with suppress(OSError):  # the server died: its end of the status socket is closed, too
        sent = socket.send_fds(control, [line], files) if files else 0
        control.sendall(line[sent:])


def _sender(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid: int = _CREDENTIALS.unpack(data)[0]
            return pid
    raise OSError("a message without the id of its sender")


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _exit_reason(code: int | None) -> str:
    if code is None:
        return ""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
