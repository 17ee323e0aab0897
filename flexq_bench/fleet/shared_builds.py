"""Builds of a project's commits, made once for all nodes of one architecture and image.

The first node that needs a build makes it and gives it to a registry, an actor of the Ray session;
the others wait for it and unpack it. Builds contain absolute paths, so only nodes with the same
path to their cache folder share them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import platform
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from flexq_bench.fleet.node_program import versions
from flexq_bench.fleet.shipping import answer_of, call, create_actor

_ACTOR = "flexq-bench builds"
_ANSWER_TIMEOUT_S = 60.0  # of the registry, which only keeps what it gets
_MAX_BYTES = 1 << 30  # of a build, compressed: larger ones are made on each node
_POLL_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer of the registry: build it, wait for another node's, or take its content."""

    what: Literal["build", "wait", "take"]
    content: bytes = b""


class BuildRegistry:
    """The builds of a session; an actor. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._contents: dict[str, bytes] = {}
        self._until: dict[str, float] = {}  # builds in progress

    def claim(self, key: str, lease_s: float) -> Claim:
        """Return what a node that needs a build is to do. lease_s: longest time of making it."""
        if key in self._contents:
            return Claim("take", self._contents[key])
        now = self._clock()
        if self._until.get(key, now) > now:
            return Claim("wait")
        self._until[key] = now + lease_s
        return Claim("build")

    def give(self, key: str, content: bytes | None) -> None:
        """Store a build. None: it was not made, so the next node makes it."""
        self._until.pop(key, None)
        if content is not None:
            self._contents[key] = content


def start_registry() -> Any:
    """Start the registry of the current session; it ends when the returned handle is dropped."""
    return create_actor(BuildRegistry, {"name": _ACTOR, "num_cpus": 0, "get_if_exists": True})


class NodeBuilds:
    """The registry as a node sees it; see `project_builds.SharedBuilds`.

    ask: calls one of its methods; None: by Ray. Without an answer the node builds by itself.
    """

    def __init__(self, ask: Callable[..., Any] | None = None) -> None:
        self._ask = ask or _ask

    @contextmanager
    def building(self, home: Path, limit_s: float) -> Iterator[bool]:
        """Yield True if the build is at `home` now, fetched; False: the block makes it there.

        limit_s: longest time of a build; another node's is waited for as long.
        """
        key = hashlib.sha256(f"{home}\0{_image()}".encode()).hexdigest()
        claim = self._claimed(key, limit_s)
        if claim.what == "take":
            with _complete(home) as folder, tarfile.open(fileobj=io.BytesIO(claim.content)) as tar:
                tar.extractall(folder, filter="tar")
            yield True
            return
        content = None
        try:
            yield False
            content = _packed(home)
        finally:
            self._answer("give", key, content)

    def _claimed(self, key: str, limit_s: float) -> Claim:
        give_up = time.monotonic() + limit_s
        while True:
            claim: Claim | None = self._answer("claim", key, limit_s)
            if claim is None or (claim.what == "wait" and time.monotonic() > give_up):
                return Claim("build")
            if claim.what != "wait":
                return claim
            time.sleep(_POLL_INTERVAL_S)

    def _answer(self, method: str, *arguments: object) -> Any:
        try:
            return self._ask(method, *arguments)
        except Exception as error:  # Ray's, of any kind: its node may be lost
            log.warning("builds are not shared: %s", error)
            return None


def _ask(method: str, *arguments: object) -> Any:
    import ray

    return answer_of(call(ray.get_actor(_ACTOR), method, *arguments), timeout_s=_ANSWER_TIMEOUT_S)


@contextmanager
def _complete(home: Path) -> Iterator[Path]:
    """A folder that becomes `home` at the end of the block, and is removed if it fails."""
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = home.with_suffix(".new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        scratch.rename(home)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _packed(home: Path) -> bytes | None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for path in sorted(home.iterdir()):
            tar.add(path, path.name)
    return buffer.getvalue() if buffer.tell() <= _MAX_BYTES else None


@cache
def _image() -> str:
    """Properties of a node that a build depends on: system, packages, the kind of GPU."""
    import torch

    release = ""
    with suppress(OSError):
        release = str(platform.freedesktop_os_release())
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    system = [platform.machine(), platform.libc_ver(), release, sorted(versions().items()), gpu]
    return json.dumps([*system, os.environ.get("PATH", "")], default=str)
