"""A sandbox for foreign code: external kernels, heads of pull requests, builds.

Its processes have a user (where this process is root), processes, mounts, System V objects and a
network of their own. They see the system, the interpreter and the folders that they need, all
read-only, and the devices of GPUs; they write to private memory of a limited size.
`flexq_bench.measure.sandbox_init` makes it; where that is not permitted, bubblewrap.
"""

from __future__ import annotations

import marshal
import os
import random
import re
import shutil
import site
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any, Literal

import flexq_bench
from flexq_bench.errors import InfrastructureError

Kind = Literal["bubblewrap", "namespaces", "none"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "namespaces")

VARIABLE = "FLEXQ_BENCH_SANDBOX"
_INIT = Path(__file__).with_name("sandbox_init.py")
_PROBE_TIMEOUT_S = 20.0
# Visible everywhere: nothing of a user's, of a service's state or of its sockets.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/sys")
_SETTINGS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Not those that manage displays, switches and other processes' memory.
_GPUS = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvidia-caps/*", "dri/render*", "dxg")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_FOLDER_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "VIRTUAL_ENV",
)
_MANAGERS = ("bin/pyenv", "conda-meta", "bin/asdf", "pyvenv.cfg")
_OWN_FOLDERS = ("HOME", "TMPDIR", "FLEXQ_BENCH_CACHE")
# Users that no system gives to anybody; a container may have fewer.
_USERS = (range(0x60000000, 0x7F000000), range(61184, 65520), range(30000, 60000))
_GIB = 1 << 30
_HIDDEN = re.compile(r"\..*|.*\.sqlite.*")
_PREFILLED = "/prefilled"
_CACHES = (".triton", ".nv", ".cache")  # in a home
# All users and programs have files here. Of such a folder only sources and modules can be read.
_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_CODE = (*all_suffixes(), ".cu", ".cuh", ".cpp", ".h", ".hpp", ".toml", ".json")
_SMALL = "4096"  # bytes: of a folder that is hidden by an empty one
_PROCESSES_PER_CPU, _MIN_PROCESSES = 16, 512  # threads count, and libraries start some per CPU


class SandboxError(InfrastructureError):
    """This machine can't make a sandbox. The message says why not, for each kind."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of all processes of a sandbox together; processes: threads are counted too.

    memory_bytes: of host memory, checked every second; None: 90 % of what is available.
    reserve_bytes: of host memory that must be left, whoever uses the rest; None: 2 % of all.
    disk_bytes: that must be left of each disk that it writes to; None: 2 %, at most 1 GiB.
    files_bytes: of the private files, and of one file.
    """

    memory_bytes: int | None = None
    reserve_bytes: int | None = None
    disk_bytes: int | None = None
    files_bytes: int = 2 * _GIB
    processes: int = _MIN_PROCESSES + _PROCESSES_PER_CPU * (os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Files, network and limits of the processes of one side.

    environment: of the processes; its HOME, TMPDIR and FLEXQ_BENCH_CACHE are private folders, empty
    at each start. read: files and folders that they may read, besides the system and the
    interpreter. write: existing files to write into. prefilled: folders that are private, too, with
    links to the files that they have outside. user: of the processes; None: this process's own,
    which may not change it.
    """

    environment: Mapping[str, str]
    kind: Kind
    read: Sequence[Path] = ()
    write: Sequence[Path] = ()
    prefilled: Sequence[Path] = ()
    network: bool = False
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    user: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "user", _user_for(self.read))

    def wrap(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return the command line that runs a command in the sandbox.

        Its first process is outside and ends as the command ends; to kill it is to kill all. Every
        call has processes and private files of its own.
        """
        if self.kind == "none":
            return tuple(command)
        plan = self._plan()
        if self.kind == "bubblewrap":
            inside = (*_init({**plan, "stage": "inside", "mounts": []}),)
            plan["bubblewrap"] = [*self._bubblewrap(plan), *inside]
        return (*_init({**plan, "stage": self.kind}), os.curdir, *command)

    @property
    def scratch(self) -> tuple[str, ...]:
        """Folders whose contents no process should find of an earlier one.

        Empty where they are not private, or prefilled once.
        """
        if self.kind == "none" or self.prefilled:
            return ()
        return (*self._own_folders(), "/tmp", "/dev/shm")

    @property
    def caches(self) -> tuple[str, ...]:
        """Folders of compilers' caches in those of `scratch`."""
        home, own = (self.environment.get(name) for name in ("HOME", "FLEXQ_BENCH_CACHE"))
        if not self.scratch or home is None:
            return ()
        of_home = [os.path.join(os.path.realpath(home), name) for name in _CACHES]
        return (*of_home, *([os.path.realpath(own)] if own else []))

    def _plan(self) -> dict[str, Any]:
        memory, reserve = self.limits.memory_bytes, self.limits.reserve_bytes
        return {
            "user": self.user,
            "groups": sorted(_device_groups()),
            "network": self.network,
            "memory_bytes": int(0.9 * _memory("MemAvailable")) if memory is None else memory,
            "reserve_bytes": int(0.02 * _memory("MemTotal")) if reserve is None else reserve,
            "disks": {os.path.realpath(path): self._reserve_of(path) for path in self.write},
            "limits": {
                "CORE": 1,  # with 0, the kernel would start its handler of crashes, as root
                "MSGQUEUE": 0,
                "NICE": 0,
                "RTPRIO": 0,
                "FSIZE": self.limits.files_bytes,
                "NPROC": self.limits.processes,
            },
            "mounts": list(self._mounts()),
            "prefilled": [[place, str(folder)] for place, folder in self._prefilled()],
        }

    def _reserve_of(self, path: Path) -> int:
        if self.limits.disk_bytes is not None:
            return self.limits.disk_bytes
        return min(shutil.disk_usage(path).total // 50, _GIB)

    def _mounts(self) -> Iterator[tuple[str, ...]]:
        """Mounts in their order: an action of sandbox_init, a path, and its details."""
        size = str(self.limits.files_bytes)
        mounts: dict[str, tuple[str, ...]] = {}
        for system in _SYSTEM:
            if os.path.islink(system):
                mounts[system] = ("link", system, os.readlink(system))
            elif os.path.exists(system):
                mounts[system] = ("read", system, system)
        mounts["/tmp"] = ("private", "/tmp", size)
        mounts["/dev/shm"] = ("private", "/dev/shm", size)
        mounts["/proc"] = ("processes", "/proc")
        for settings in _SETTINGS:  # root may write there without any capability
            if os.path.exists(settings):
                mounts[settings] = ("read", settings, settings)
        for device in _device_files():
            mounts[device] = ("device", device, device)
        for name, target in _LINKS.items():
            mounts[f"/dev/{name}"] = ("link", f"/dev/{name}", target)
        for folder in self._own_folders():
            is_inside = folder.startswith("/tmp/")
            mounts[folder] = ("folder", folder) if is_inside else ("private", folder, size)
        read = [*_interpreter(), *_folders_of(self.environment), *self.read]
        for place, source in self._prefilled():
            mounts[place] = ("read", place, str(source))
        if self.network:  # names are resolved by a file that may lie among the sockets
            read.append(Path("/etc/resolv.conf"))
        for path in read:
            real = os.path.realpath(path)
            for seen in {real, os.path.abspath(path)} if os.path.exists(real) else ():
                is_shared = seen in _SHARED_FOLDERS
                if is_shared or seen in self._own_folders():
                    # its contents, in a folder that stays private
                    for entry in os.scandir(real):
                        if not is_shared or _is_code(entry):
                            place = f"{seen}/{entry.name}"
                            mounts.setdefault(place, ("read", entry.path, entry.path))
                else:
                    mounts[seen] = ("read", seen, real)
        for folder in self._own_folders():
            if _above(folder, mounts)[0] == "read":
                mounts[folder] = ("private", folder, size)
                with suppress(OSError):  # nothing can be made there in the sandbox
                    os.makedirs(folder, exist_ok=True)
        for place, (what, _, *details) in list(mounts.items()):
            if what != "read" or place in _SYSTEM or os.path.realpath(place) != place:
                continue
            for name in _hidden_in(details[0]):
                is_folder = os.path.isdir(f"{place}/{name}")
                cover = ("private", _SMALL) if is_folder else ("device", "/dev/null")
                mounts.setdefault(f"{place}/{name}", (cover[0], f"{place}/{name}", cover[1]))
        for path in self.write:
            mounts[str(path)] = ("write", str(path), os.path.realpath(path))
        own = self._own_folders()
        for place in list(mounts):
            for folder in map(str, Path(place).parents):
                # Else it would be made by root, and its processes could write nothing beside.
                is_inside = any(folder.startswith(f"{top}/") for top in own)
                if is_inside and _above(folder, mounts)[0] != "read":
                    mounts.setdefault(folder, ("folder", folder))
        for place in sorted(mounts, key=lambda place: place.count("/")):
            if mounts[place][0] != "read" or _above(place, mounts)[0] != "read":
                yield mounts[place]

    def _prefilled(self) -> list[tuple[str, Path]]:
        """Prefilled folders, by the place where they can be read."""
        there = [folder for folder in self.prefilled if folder.is_dir()]
        return [(f"{_PREFILLED}/{number}", folder) for number, folder in enumerate(there)]

    def _own_folders(self) -> list[str]:
        named = (self.environment.get(name) for name in _OWN_FOLDERS)
        folders = {os.path.realpath(folder) for folder in named if folder}
        # A folder inside another private one needs no size of its own.
        return sorted(folders)

    def _bubblewrap(self, plan: Mapping[str, Any]) -> list[str]:
        options = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        options += ["--as-pid-1", "--die-with-parent", "--new-session"]
        options += [] if self.network else ["--unshare-net"]
        if plan["user"] is None:
            options += ["--unshare-user"]
        else:  # to change the user, and to drop these
            options += ["--cap-drop", "ALL"]
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_SYS_RESOURCE"):
                options += ["--cap-add", capability]
        made: set[str] = set()
        mounts = {mount[1]: mount for mount in plan["mounts"]}
        for what, path, *details in plan["mounts"]:
            for parent in reversed(Path(path).parents[:-1]):
                # Those that bubblewrap makes by itself are root's alone.
                if str(parent) not in made and _above(path, mounts)[0] != "read":
                    options += ["--perms", "0755", "--dir", str(parent)]
            made |= {path, *map(str, Path(path).parents)}
            if what == "private":
                options += ["--perms", "1777", "--size", details[0], "--tmpfs", path]
            elif what == "folder":
                options += ["--perms", "0777", "--dir", path]
            elif what == "link":
                options += ["--symlink", details[0], path]
            elif what == "processes":
                options += ["--proc", path]
            else:
                bind = {"read": "--ro-bind", "write": "--bind", "device": "--dev-bind"}[what]
                options += [bind, details[0], path]
        return [*options, "--chdir", "/", "--"]


@contextmanager
def building(
    environment: Mapping[str, str],
    kind: Kind,
    home: Path,
    network: bool = False,
    read: Sequence[Path] = (),
) -> Iterator[Callable[[Sequence[str]], Sequence[str]]]:
    """Wrap the commands of a build, which writes to `home`: see Sandbox.wrap."""
    sandbox = Sandbox(environment, kind, read, write=[home], network=network)
    if kind == "none" or sandbox.user is None:
        yield sandbox.wrap
        return
    _give(home, sandbox.user)
    try:
        yield sandbox.wrap
    finally:
        _give(home, os.geteuid())


def _give(top: Path, user: int) -> None:
    # As deep as a build liked to make folders: Python's functions go down by recursion.
    subprocess.run(["chown", "-hR", str(user), str(top)], stderr=subprocess.DEVNULL, check=False)


def available_kind() -> Kind:
    """The first kind of sandbox that works on this machine.

    $FLEXQ_BENCH_SANDBOX names the only one to take; "none": none.
    """
    wanted = os.environ.get(VARIABLE)
    kinds = KINDS if wanted is None else [kind for kind in KINDS if kind == wanted]
    return next((kind for kind in kinds if not obstacle(kind)), "none")


def required_kind() -> Kind:
    """The first kind of sandbox that works. Raises SandboxError if none does."""
    kind = next((kind for kind in KINDS if not obstacle(kind)), None)
    if kind is None:
        reasons = "; ".join(f"{kind}: {obstacle(kind)}" for kind in KINDS)
        raise SandboxError(
            f"unreviewed code runs in a sandbox, and this machine allows none ({reasons}): see "
            "docs/threat_model.md#sandbox for what to allow, or take --no-sandbox"
        )
    return kind


@cache
def obstacle(kind: Kind) -> str:
    """The reason why a kind does not work here, in a line; empty: it works. Tried once."""
    if sys.platform != "linux":
        return "it needs Linux"
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    environment = {"HOME": "/tmp/home", "PATH": os.environ.get("PATH", os.defpath)}
    command = Sandbox(environment, kind=kind).wrap([sys.executable, "-I", "-S", "-c", "print(42)"])
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.stdout == b"42\n":
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _is_code(entry: os.DirEntry[str]) -> bool:
    """True for a source, a module or a package."""
    if entry.is_dir(follow_symlinks=False):
        return os.path.isfile(f"{entry.path}/__init__.py")
    return entry.name.endswith(_CODE) and entry.is_file(follow_symlinks=False)


def _init(plan: Mapping[str, Any]) -> tuple[str, ...]:
    # Imported, so that it is compiled once.
    code = f"import sys; sys.path.append({str(_INIT.parent)!r}); import {_INIT.stem} as i; i.main()"
    options = ("-I", "-S", *(["-B"] if sys.dont_write_bytecode else []))
    return (sys.executable, *options, "-c", code, marshal.dumps({**plan}).hex())


def _interpreter() -> Iterator[Path]:
    """Folders of the interpreter, its packages, and this program."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    yield from map(Path, (*prefixes, site.getusersitepackages()))
    home = os.path.expanduser("~") + os.sep
    yield from (Path(path) for path in sys.path if path and not home.startswith(path + os.sep))
    package = Path(flexq_bench.__file__).parent
    yield package
    yield from (path for path in package.iterdir() if path.is_symlink())
    yield _INIT


def _folders_of(environment: Mapping[str, str]) -> Iterator[Path]:
    """Folders that the variables name, and those of version managers, as pyenv and conda are.

    Their commands start interpreters that lie beside `shims` or `bin`.
    """
    for name in _FOLDER_VARIABLES:
        for folder in environment.get(name, "").split(os.pathsep):
            if folder.startswith("/"):
                yield Path(folder)
    for folder in environment.get("PATH", "").split(os.pathsep):
        root = Path(folder).parent
        if any(os.path.exists(root / mark) for mark in _MANAGERS):  # False if it may not look
            yield root


def _hidden_in(folder: str) -> Iterator[str]:
    """Entries of a readable folder that are not shown: .git, .env and the like, and databases.

    Nothing can be mounted over a link; what it leads to is shown by its own name, or not.
    """
    if os.path.isdir(folder):
        with os.scandir(folder) as entries:
            hidden = (
                entry for entry in entries if _HIDDEN.match(entry.name) and not entry.is_symlink()
            )
            yield from (entry.name for entry in hidden)


def _above(path: str, mounts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The mount that a path lies in, besides its own."""
    parents = (str(parent) for parent in Path(path).parents)
    return next((mounts[parent] for parent in parents if parent in mounts), ("private", "/"))


def _device_files() -> Iterator[str]:
    for pattern in (*_DEVICES, *_GPUS):
        for path in Path("/dev").glob(pattern):
            # What is its owner's alone, as the right to divide a GPU, stays root's.
            if path.is_char_device() and path.stat().st_mode & 0o077:
                yield str(path)


def _device_groups() -> set[int]:
    """Groups whose members may use the GPUs' devices."""
    return {
        status.st_gid
        for status in (os.stat(path) for path in _device_files())
        if status.st_gid and not status.st_mode & 0o006
    }


def _user_for(read: Sequence[Path]) -> int | None:
    """A random user of nobody's, or this one where others may not read what it is to read.

    None: this process may not change its user, or has no others.
    """
    if os.geteuid() != 0 or not _may_mount():
        return None
    if not all(path.stat().st_mode & stat.S_IROTH for path in read if path.exists()):
        return os.geteuid()
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [range(int(line.split()[0]), sum(map(int, line.split()[::2]))) for line in lines]
    for users in _USERS:
        for known in ranges:
            if users.start in known and users[-1] in known:
                return random.SystemRandom().choice(users)
    return None


@cache
def _may_mount() -> bool:
    """Return True if this process has the capabilities that namespaces without a user's need."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    needed = (6, 7, 21)  # CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN
    return all(effective >> bit & 1 for bit in needed)


def _memory(name: str) -> int:
    """Bytes of host memory by a name of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
