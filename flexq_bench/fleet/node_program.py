"""The node's end of a program that is shipped with its actors; it imports nothing of flexq_bench.

Ray carries the contents of this module by value. A node therefore needs the dependencies of this
program in compatible versions, and neither its code nor an installation of it: an actor runs the
coordinator's code, unpacked into the node's own cache folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import platform
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = "flexq_bench"
_KEPT_S = 14 * 86_400.0  # an unpacked folder that was not used for so long is removed
# Distributions whose version affects results or the exchange between processes.
_COMPARED = ("torch", "numpy", "ray", "triton", "cupy-cuda12x", "cupy-cuda13x")


@dataclass(frozen=True)
class Parcel:
    """A folder as one object. digest: SHA-256 of its tar file. content: Ray's reference to it."""

    digest: str
    content: Any

    def unpacked(self, home: Path) -> Path:
        """Return the folder in `home`, fetched if it is not there.

        Raises OSError if its content is not what was packed, or can't be written.
        """
        import ray

        return unpacked(home, self.digest, lambda: ray.get(self.content))


def unpacked(home: Path, digest: str, fetch: Callable[[], bytes]) -> Path:
    """Return the folder with the files of a tar file, unpacked on the first call.

    Other processes see the complete folder or none. Folders of `home` that were not used for two
    weeks are removed when a new one is unpacked. Raises OSError if the content has another digest.
    """
    folder = home / digest[:32]
    if not folder.is_dir():
        content = fetch()
        if hashlib.sha256(content).hexdigest() != digest:
            raise OSError(f"an object arrived damaged at {platform.node()}: run this again")
        home.mkdir(parents=True, exist_ok=True)
        _remove_unused(home)
        scratch = Path(tempfile.mkdtemp(dir=home, prefix=".new-"))
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                tar.extractall(scratch, filter="tar")
            scratch.chmod(0o755)  # processes of a sandbox have another user
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):
        os.utime(folder)
    return folder


def _remove_unused(home: Path) -> None:
    for folder in home.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _KEPT_S:
                shutil.rmtree(folder)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results; missing packages are left out."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _COMPARED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    with suppress(ImportError):
        from torch.version import cuda

        if cuda:
            versions["CUDA of torch"] = cuda
    return versions


def check_versions(coordinator: Mapping[str, str]) -> None:
    """Raise ImportError if a version that both machines have differs.

    Local parts (2.11.0+cpu) don't count: a coordinator needs no GPU.
    """
    here = versions()
    differing = [
        name
        for name in coordinator
        if name in here and _public(here[name]) != _public(coordinator[name])
    ]
    if differing:
        theirs, ours = (
            ", ".join(f"{name} {versions[name]}" for name in differing)
            for versions in (here, coordinator)
        )
        raise ImportError(
            f"{platform.node()} has {theirs}, and the coordinator {ours}: install the same there"
        )


def _public(version: str) -> str:
    return version.partition("+")[0]


def import_from(folder: Path) -> None:
    """Import this package from a folder, in this process and in those that it starts."""
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


@dataclass(frozen=True)
class Program:
    """The coordinator's code. versions: of the packages that it runs with."""

    parcel: Parcel
    versions: Mapping[str, str]

    def load(self) -> None:
        """Unpack and import it. Raises ImportError if this machine has other versions, OSError."""
        check_versions(self.versions)
        import platformdirs

        override = os.environ.get("FLEXQ_BENCH_CACHE")
        cache = Path(override) if override else platformdirs.user_cache_path("flexq-bench")
        import_from(self.parcel.unpacked(cache / "programs"))


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, references: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._references = references

    def persistent_load(self, number: Any) -> Any:
        return self._references[number]


def class_that_loads(actor: type) -> type:
    """Return a class with the methods of an actor, which loads the program before the actor.

    It is created with the program, and the actor's class and arguments; the first call loads them.
    `started` answers before that, once the process runs on its devices. Arguments and answers
    are bytes: Ray's client unpickles others on the head node, which may have other code. An answer
    is (True, the pickled result) or (False, the pickled exception). If the actor can't be created,
    every call answers with the reason.
    """

    class Loading:
        def __init__(self, program: Any, pickled: bytes, references: Sequence[Any]) -> None:
            self._given: tuple[Any, bytes, Sequence[Any]] | None = (program, pickled, references)
            self._actor: Any = None
            self._refusal: Exception | None = None

        def started(self) -> None:
            pass

        def _load(self, program: Any, pickled: bytes, references: Sequence[Any]) -> None:
            try:
                program.load()
                loaded, arguments = _Unpickler(pickled, references).load()
                self._actor = loaded(*arguments)
            except Exception as error:
                self._refusal = error

        def _call(self, method: str, pickled: bytes, references: Sequence[Any]) -> Any:
            if self._given is not None:
                given, self._given = self._given, None
                self._load(*given)
            if self._refusal is not None:
                return False, _pickled(self._refusal)
            arguments = _Unpickler(pickled, references).load() if pickled else ()
            try:
                return True, _pickled(getattr(self._actor, method)(*arguments))
            except Exception as error:
                return False, _pickled(error)

    def forwarded(method: str) -> Callable[..., Any]:
        def call(self: Any, pickled: bytes = b"", references: Sequence[Any] = ()) -> Any:
            return self._call(method, pickled, references)

        return call

    for name in dir(actor):
        if not name.startswith("_") and callable(getattr(actor, name)):
            setattr(Loading, name, forwarded(name))
    Loading.__name__ = Loading.__qualname__ = actor.__name__
    return Loading


def _pickled(value: Any) -> bytes:
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception:
        if not isinstance(value, Exception):
            raise
        return pickle.dumps(RuntimeError(f"{type(value).__name__}: {value}"))
