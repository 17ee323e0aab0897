"""A server that has imported dependencies and forks a process per request: stdin is its socket.

    python fork_server.py MARK PROGRAM [LIBRARY]...

MARK: name of a variable of its environment, over which each process writes the name of its own
mark (flexq_bench.repository.descendants), because /proc shows the environment of the server.
PROGRAM: a folder whose code is trusted, or empty; the server imports what the first module that is
requested imports from there. LIBRARY: a module of the kernels that its processes run.

It runs as a script and uses nothing of flexq_bench, because its processes run the code of any
commit. It touches no device. Its other end is `ForkServer` in flexq_bench.measure.launcher.

A request is a line of JSON; its files come with it (SCM_RIGHTS). `command`, `folder`,
`environment`, `mark` and the files [stdin, stdout, stderr, status] start a process; `module` and
`environment` import what the processes of that module will need; `empty` and
`caches`, lists of folders, and the file [status] end all processes and empty the former, or end the
server if that fails; the files that the latter had when there were first any are written again. On
a status socket, each message is one of

    + O      from the new process, with its id as the kernel translates it for the reader; O: why it
             executes the command, empty if it does not
    exit 3   its return code, as `subprocess` defines it; all that it started has ended, too
    error E  the reason why there is no process

A process behaves like a fresh `python -m MODULE` in that folder with that environment. If it could
not, because the environment or a module of the server differs from what a fresh interpreter would
have, it executes the command instead. What still differs: all processes of a server share the seed
of Python's hashes, and the addresses of what the server loaded are not random.
"""

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # the folder of this script, which has modules with names of others

import contextlib
import ctypes
import errno
import functools
import gc
import importlib
import json
import mmap
import os
import runpy
import secrets
import select
import selectors
import signal
import socket
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from typing import Any

# Dependencies of worker processes. One that is not installed is left out.
PRELOADED = (
    *("torch", "numpy", "triton", "triton.language", "triton.runtime.jit"),
    # Triton imports these before its first launch.
    *("triton.compiler.code_generator", "triton.tools.tensor_descriptor"),
    *("triton.experimental.gluon.nvidia.hopper", "triton.experimental.gluon.amd.gfx1250"),
    *("scipy.special", "platformdirs", "pynvml"),
    *("pydantic.main", "pydantic.functional_validators", "pydantic.fields", "pydantic.types"),
    *("cupy", "cuda.bindings.nvrtc"),
    *("importlib.metadata", "importlib.resources", "shlex", "statistics", "tomllib", "zoneinfo"),
)
# Dependencies that could open a GPU when they are imported, as libraries of kernels could: tried in
# a process first.
TRIED = ("cuda.bindings.driver",)
# Variables that processes may have values of their own of: no dependency reads them at its import.
_OF_EACH_PROCESS = (
    *("PYTHONPATH", "FLEXQ_BENCH_PROJECT_BUILD", "FLEXQ_BENCH_CACHE"),
    "PYTEST_CURRENT_TEST",
)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_ADDR_NO_RANDOMIZE, _PRESENT_PERSONALITY = 0x0040000, 0xFFFFFFFF  # personality(2)
_ENV_START, _ENV_END = 47, 48  # fields of /proc/PID/stat after the program's name (proc(5): 50, 51)
_MESSAGE_BYTES = 1 << 16
_REQUEST_FILES = 4
_POLL_S = 0.001
_MAX_CACHED_BYTES = 1 << 28
_TRIAL_S = 60.0  # for the imports in trials, after which they are killed
_END_S = 5.0  # for the end of all processes that a process started
_MAX_SHIFT_PAGES = 1 << 16
_INTERPRETER = os.path.realpath(sys.executable)
_LIBC = ctypes.CDLL(None, use_errno=True)

Request = dict[str, Any]


class Server:
    """Processes and their status sockets, by id.

    is_pure: True if forks are like new processes. None: nothing was imported so far.
    """

    def __init__(
        self, control: socket.socket, mark: str, program: str | None, libraries: list[str]
    ) -> None:
        self._control = control
        self._libraries = libraries
        self._mark = mark
        self._program = program
        self._environment = dict(os.environ)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._statuses: dict[int, socket.socket] = {}
        self._unread = b""
        self._files: list[int] = []
        self._has_answered = False
        # Compiled code by path. In this memory, no process can change it for a later one.
        self._cached: dict[str, bytes] = {}
        self.is_pure: bool | None = None

    def serve(self) -> Request | None:
        """Answer requests until the socket's end: None. In a new process, return its request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    read, files, _, _ = socket.recv_fds(
                        self._control, _MESSAGE_BYTES, _REQUEST_FILES
                    )
                    if not read:
                        return None
                    self._files += files
                    self._unread += read
                else:
                    self._report_exit(key.data, key.fd)
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                request = self._answer(json.loads(line))
                if request is not None:
                    return request

    def end(self) -> None:
        for pid in self._statuses:
            _signal(pid, signal.SIGKILL)
        self._end_orphans(set())

    def _answer(self, request: Request) -> Request | None:
        """Carry out a request. In the new process, return it."""
        if "empty" in request:
            status = socket.socket(fileno=self._files.pop(0))
            self._empty(request["empty"], request["caches"])
            _send(status, b"exit 0")
            status.close()
            return None
        if not self._has_answered:
            self._adopt_environment(request)
            self._has_answered = True
        if "module" in request:
            self._import(request["module"])
            return None
        files, self._files = self._files[:_REQUEST_FILES], self._files[_REQUEST_FILES:]
        status = socket.socket(fileno=files[3])
        server = os.getpid()
        if _is_module(request):
            self._import(request["command"][2])
        _prctl(_PR_SET_DUMPABLE, 0)  # no process of this user may trace or read this one
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads: those of OpenBLAS survive a fork
                pid = os.fork()
        except OSError as error:
            _send(status, f"error {error.strerror}".encode())
            status.close()
        else:
            if pid == 0:
                self._become(request, files, status, server)
                return request
            self._statuses[pid] = status
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        for file in files[:3]:
            os.close(file)
        return None

    def _adopt_environment(self, request: Request) -> None:
        """Take over what a sandbox set, as bubblewrap sets PWD, as if it had been asked for.

        The launcher started this server with the variables of the first request.
        """
        own = (*_OF_EACH_PROCESS, self._mark, request.get("mark"))
        self._environment = {
            **{k: v for k, v in request["environment"].items() if k not in own},
            **{k: v for k, v in self._environment.items() if k in own},
        }

    def _import(self, module: str) -> None:
        """Import what the processes of a module need, unless something was imported already."""
        if self.is_pure is not None:
            return
        self.is_pure = (
            preload(self._libraries) and self._import_program(module) and not _has_opened_gpu()
        )
        for name in _loaded_names():
            _folder_of(name)  # each process asks for all of them
        gc.collect()
        gc.freeze()  # a collection in a process would copy the pages of all these objects

    def _import_program(self, module: str) -> bool:
        """Import what a module imports. Return False if that fails."""
        if self._program is None:
            return True
        sys.path.insert(0, self._program)
        try:
            importlib.import_module(module)
        except Exception:  # a module may raise any; a new process then reports it
            traceback.print_exc()
            return False
        sys.path.remove(self._program)
        return True

    def _become(
        self, request: Request, files: list[int], status: socket.socket, server: int
    ) -> None:
        """Turn this new process into the one that was requested."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # while it runs, orphans are found among its children
        _prctl(_PR_SET_DUMPABLE, 1)  # else its owner can't read which processes have its mark
        if os.getppid() != server:
            os._exit(1)
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
            os.close(file)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)  # also the control socket
        for other in self._statuses.values():
            other.close()
        self._selector.close()
        _replace_in_environment(self._mark, request["mark"])
        os.chdir(request["folder"])
        theirs, ours = request["environment"], self._environment
        names = {name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}
        request["differing"] = sorted(names)
        obstacle = self._obstacle(request)
        if not _send(status, f"+ {obstacle}".encode()):
            os._exit(1)  # nobody waits for this process any more
        status.close()
        if obstacle:
            command = request["command"]
            os.execvpe(command[0], command, request["environment"])

    def _obstacle(self, request: Request) -> str:
        """Describe why this process would not be like a new one; empty: it is."""
        if not _is_module(request):
            return "other command"
        if not self.is_pure:
            return "a dependency does not import, or opens a GPU"
        others = set(request["differing"]) - {*_OF_EACH_PROCESS, self._mark, request["mark"]}
        if others:
            return f"variables differ from those of the first process: {', '.join(sorted(others))}"
        hidden = _hidden(_own_path(request), self._program)
        return f"its folders have other modules: {', '.join(sorted(hidden))}" if hidden else ""

    def _report_exit(self, pid: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        socket_ = self._statuses.pop(pid)
        self._end_orphans(set(self._statuses))
        _send(socket_, f"exit {os.waitstatus_to_exitcode(status)}".encode())
        socket_.close()

    def _end_orphans(self, besides: set[int]) -> None:
        """End children that no request started: their parents have ended."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            orphans = _children() - besides
            if not orphans:
                return
            for pid in orphans:
                _signal(pid, signal.SIGSTOP)  # all of them first: they may start others
            for pid in orphans:
                _signal(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_POLL_S)

    def _empty(self, folders: list[str], caches: list[str]) -> None:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):  # there is none
                os.kill(-1, signal.SIGKILL)  # all of this namespace but this process
        for pid in self._statuses:
            _signal(pid, signal.SIGKILL)
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._control:
                self._report_exit(key.data, key.fd)
        self._end_orphans(set())
        if not self._cached:
            self._cached = dict(_files_in(caches))
        kept = {above for folder in folders for above in _and_above(folder)}
        # Those that others are in come first: one may have been removed, or replaced by a link.
        if not all(_is_emptied(folder, kept) for folder in sorted(folders, key=len)):
            sys.exit("processes left folders that can't be removed: a new server is needed")
        for path, content in self._cached.items():
            with contextlib.suppress(OSError):  # the next process compiles it again
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb") as file:
                    file.write(content)


def _and_above(folder: str) -> list[str]:
    parts = folder.split(os.sep)
    return [os.sep.join(parts[:end]) for end in range(2, len(parts) + 1)]


def _is_emptied(top: str, kept: set[str]) -> bool:
    """Remove all in a folder but folders to keep and mounts. Return False if something remains."""
    try:
        os.makedirs(top, exist_ok=True)
        device, folders, waiting = os.lstat(top).st_dev, [], [top]
        while waiting:
            folder = waiting.pop()
            folders.append(folder)
            for entry in os.scandir(folder):
                if entry.stat(follow_symlinks=False).st_dev != device:
                    kept.update(_and_above(folder))
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not _is_removed(entry.path):
                    kept.update(_and_above(folder))
        for folder in reversed(folders):
            if folder not in kept:
                os.rmdir(folder)
    except OSError:
        return False
    return True


def _files_in(folders: list[str]) -> Iterator[tuple[str, bytes]]:
    """Files in these folders, but not in mounts, until there are too many bytes."""
    left = _MAX_CACHED_BYTES
    for top in folders:
        for folder, inner, names in os.walk(top):
            device = os.lstat(top).st_dev
            inner[:] = [n for n in inner if os.lstat(os.path.join(folder, n)).st_dev == device]
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                    with open(os.open(path, flags), "rb") as file:
                        content = file.read(left + 1)
                    left -= len(content)
                    if left < 0:
                        return
                    yield path, content


def _is_removed(file: str) -> bool:
    """Remove a file. Return False if another one is mounted over it."""
    try:
        os.unlink(file)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def preload(libraries: list[str]) -> bool:
    """Import the dependencies. Return False if processes should not be forked after that."""
    trials = [(name, _trial(name)) for name in (*TRIED, *libraries)]
    deadline = time.monotonic() + _TRIAL_S
    if not all(map(_imports, PRELOADED)):
        return False
    _hash_compiler()
    succeeded = [name for name, pid in trials if _has_succeeded(pid, deadline)]
    return all(map(_imports, succeeded))


def _hash_compiler() -> None:
    """Let Triton hash its compiler, of half a gigabyte, as each process would before a launch.

    Not in a thread: the memory that it leaves would be every process's first, at one address.
    """
    with contextlib.suppress(Exception):  # it is not installed, or of another version
        sys.modules["triton.runtime.cache"].triton_key()


def _imports(name: str) -> bool:
    """Import a dependency, if it is installed. Return False if it does not import."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return True
    except Exception:  # a package may raise any; a new process then reports it
        traceback.print_exc()
        return False
    return True


def _trial(name: str) -> int:
    """Import a module in a process of its own, which fails if a GPU is open then."""
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            os._exit(1)
        os._exit(int(_has_opened_gpu()))
    return pid


def _has_succeeded(pid: int, deadline: float) -> bool:
    """Wait for a process, which is killed at a time (of `time.monotonic`)."""
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    return os.waitpid(pid, 0)[1] == 0


def run(request: Request) -> None:
    """Run the module as a new interpreter does. Exceptions and exits are the interpreter's."""
    environment, command = request["environment"], request["command"]
    for name in request["differing"]:  # others may have been set by an import, as in a new process
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)
    _forget_listings(sys.path)
    sys.path[:] = dict.fromkeys([*_own_path(request), *sys.path])
    sys.argv[:] = ["-m", *command[3:]]
    sys.orig_argv[:] = command
    sys.modules["__main__"] = types.ModuleType("__main__")
    # Python and torch seed their generators as in a new process: by a hook, and by a constant.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(secrets.randbits(32))
    _shift_addresses()
    sys.modules.pop(command[2], None)  # as in a new process, it is only __main__
    runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]


def _forget_listings(installed: list[str]) -> None:
    """Forget which files folders have, but for installed ones: they are read-only.

    To list those again takes longer than a fork.
    """
    inside = tuple(folder + os.sep for folder in installed)
    for folder, finder in list(sys.path_importer_cache.items()):
        if finder is None or not (folder in installed or folder.startswith(inside)):
            del sys.path_importer_cache[folder]


def _is_module(request: Request) -> bool:
    """Return True if the command runs a module by this interpreter, without other options."""
    command: list[str] = request["command"]
    return command[1:2] == ["-m"] and os.path.realpath(command[0]) == _INTERPRETER


def _own_path(request: Request) -> list[str]:
    """Folders that come first on the path of `python -m`, which is in its working directory."""
    python_path = request["environment"].get("PYTHONPATH", "")
    entries = python_path.split(os.pathsep) if python_path else []
    return [os.getcwd(), *map(os.path.abspath, entries)]


def _hidden(folders: list[str], program: str | None) -> set[str]:
    """Loaded modules instead of which those in these folders would be imported."""
    hidden = set()
    names = {*_loaded_names(), "sitecustomize", "usercustomize"}
    names -= set(sys.builtin_module_names)
    suffixes = all_suffixes()
    own = {_real(entry) for entry in ([*sys.path, program] if program else sys.path)}
    for folder in folders:
        real = os.path.realpath(folder)
        if real in own:  # modules that were loaded from there come first
            names = {name for name in names if _folder_of(name) != real}
            continue
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            name, dot, rest = entry.partition(".")
            if name not in names:
                continue
            if dot + rest in suffixes or (
                not dot
                and any(
                    os.path.exists(os.path.join(folder, name, f"__init__{end}")) for end in suffixes
                )
            ):
                hidden.add(name)
    return hidden


@functools.cache
def _real(path: str) -> str:
    return os.path.realpath(path)


def _loaded_names() -> list[str]:
    return [name for name in sys.modules if "." not in name]


@functools.cache
def _folder_of(name: str) -> str | None:
    """Folder of the path from which a top-level module was loaded; None: from none."""
    module = sys.modules.get(name)
    file: str | None = getattr(module, "__file__", None)
    if file is None:
        return None
    folder = os.path.dirname(file)
    return _real(os.path.dirname(folder) if hasattr(module, "__path__") else folder)


def _shift_addresses() -> None:
    """Move what is mapped from now on by a random distance, as in a new process."""
    libc_mmap = _LIBC.mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    pages = 1 + secrets.randbelow(_MAX_SHIFT_PAGES)
    libc_mmap(None, pages * mmap.PAGESIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def _replace_in_environment(mark: str, new: str) -> None:
    """Write a mark over the server's in the environment that /proc shows of this process."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    position = ctypes.string_at(start, end - start).find(mark.encode() + b"=")
    if position >= 0 and len(new) == len(mark):
        ctypes.memmove(start + position, new.encode(), len(new))


def _children() -> set[int]:
    """Children of this process."""
    children = set()
    own = str(os.getpid()).encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == own:
                    children.add(int(name))
    return children


def _has_opened_gpu() -> bool:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return any(name.startswith("/dev/nvidia") for name in names)


def _send(status: socket.socket, message: bytes) -> bool:
    """Send a message. Return False if the other end was closed."""
    try:
        status.send(message)
    except OSError:
        return False
    return True


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _fix_addresses() -> None:
    """Start this program again, with addresses that are not random if the system allows that.

    Where a process has its libraries can make its kernels slower or faster, by 5 to 8 % on a CPU;
    so it is the same for all processes of a server, and must be for those of the other side's
    server (Mytkowicz et al. 2009, Producing Wrong Data Without Doing Anything Obviously Wrong!).
    """
    present = _LIBC.personality(_PRESENT_PERSONALITY)
    if present == -1 or present & _ADDR_NO_RANDOMIZE:
        return
    if _LIBC.personality(present | _ADDR_NO_RANDOMIZE) != -1:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> Request:
    _fix_addresses()
    mark, program, *libraries = sys.argv[1:]
    server = Server(socket.socket(fileno=os.dup(0)), mark, program or None, libraries)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # As process 1 of its namespace, it gets no signal from there that it does not handle.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = server.serve()
    if request is None:
        server.end()
        os._exit(0)  # without the cleanup of Python and libraries: 0.3 s with torch
    return request


if __name__ == "__main__":
    run(main())
