"""Objects that a coordinator ships to the nodes of a cluster: its program, commits and kernels.

Every object is named by a hash of its content and put into Ray's object store once per session. A
node unpacks it into its own cache folder, so the nodes and the coordinator share no path.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from flexq_bench.fleet import node_program
from flexq_bench.fleet.node_program import PACKAGE, Parcel, Program
from flexq_bench.repository.provenance import ROOT


def packed(folder: Path) -> bytes:
    """Return the files of a folder as a tar file, with its name; links are followed."""
    files = {path.relative_to(folder.parent).as_posix(): path for path in _files(folder)}
    return packed_files(files)


def packed_files(files: Mapping[str, Path]) -> bytes:
    """Return files as a tar file, equal for equal files. files: by their names in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, path in sorted(files.items()):
            entry, content = tarfile.TarInfo(name), path.read_bytes()
            entry.size, entry.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), compresslevel=1, mtime=0)


def parcel(content: bytes) -> Parcel:
    """Put a tar file into the object store of the current Ray session."""
    import ray

    return Parcel(hashlib.sha256(content).hexdigest(), ray.put(content))


def create_actor(actor: type, options: dict[str, Any], *arguments: object) -> Any:
    """Create an actor with Ray's options, which runs this program's code; returns its handle.

    Its methods are called with `call`. Every call raises ImportError if the node's versions differ,
    with both versions, or else the exception with which the actor could not be created.
    """
    import ray

    created = ray.remote(_loading(actor)).options(**options)
    return created.remote(_program(session_name()), *_pickled((actor, arguments)))


def call(handle: Any, method: str, *arguments: object) -> Any:
    """Call a method of an actor; returns a reference of Ray, for `answer_of`."""
    return getattr(handle, method).remote(*_pickled(arguments))


def answer_of(reference: Any, *, timeout_s: float | None = None) -> Any:
    """Wait for the answer of a call and return it.

    Raises the exception of the actor, and RayError if the actor is lost or does not answer in time.
    """
    import ray

    succeeded, content = ray.get(reference, timeout=timeout_s)
    answer = pickle.loads(content)
    if not succeeded:
        raise answer
    return answer


def _pickled(value: object) -> tuple[bytes, list[Any]]:
    """Pickle a value; references of Ray in it are numbers, which Ray gets as a list."""
    import ray
    from ray import cloudpickle

    references: list[Any] = []

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray has no types for it
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, ray.ObjectRef):
                return None
            references.append(part)
            return len(references) - 1

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue(), references


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(place, name) for name in names)


@cache
def _loading(actor: type) -> type:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(node_program)
    return node_program.class_that_loads(actor)


@cache
def _packed_program() -> bytes:
    return packed(ROOT / PACKAGE)


@lru_cache(maxsize=1)
def _program(session: str) -> Program:
    return Program(parcel(_packed_program()), node_program.versions())


def session_name() -> str:
    """Return the name of the current Ray session, for caches of references.

    The first job of every cluster has the same id, but each node has an id of its own.
    """
    import ray

    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()}"
