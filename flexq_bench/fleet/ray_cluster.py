"""A Ray cluster: started on this machine or joined, and its slots for workers."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexq_bench.errors import InfrastructureError, library_reason
from flexq_bench.fleet.shipping import create_actor
from flexq_bench.kernels.contract import Backend
from flexq_bench.packages import require_extra

LOCAL = "local"
MAX_CPU_SLOTS = 4
_OBJECT_STORE_BYTES = 128 << 20  # enough for cases and results of some hundred kilobytes
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Ray replaces 127.0.0.1 by an address that is reachable from outside, unless clusters of several
# machines are disabled: this variable does that, on any system. Ray reads it on import.
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

_CLIENT_FAILURE = "Initialization failure from server"
_ACCELERATOR = "accelerator_type:"
_CLIENT = "ray://"
_CONNECT_TIMEOUT_S = 10.0
# A head node takes clients before its agent, which their processes need, has started.
_CLIENT_WAIT_S, _CLIENT_PAUSE_S = 60.0, 2.0
_TOKEN_MODE = "RAY_AUTH_MODE"
_TOKEN_FILE = ".ray/auth_token"
_OTHER_VERSIONS = "Version mismatch"  # how Ray's message begins
_TOKENS = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}

log = logging.getLogger(__name__)


def cpu_slots() -> int:
    """Number of actors that measure concurrently on this machine's CPU."""
    return min(len(os.sched_getaffinity(0)), MAX_CPU_SLOTS)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one worker on a node. number: index of the slot; Ray assigns the GPUs.

    accelerator: Ray's name of the node's GPUs, such as H200 or GeForce-RTX-3090-Ti; empty: none.
    gpus: of a worker; on a CPU, cores.
    """

    node: str  # Ray's id
    host: str
    number: int
    backend: Backend
    accelerator: str = ""
    gpus: int = 1

    def create(self, actor: type, *arguments: object) -> Any:
        """Create actor(backend, *arguments) on this slot; only one at a time gets its devices.

        Ray assigns all of an actor's devices at once: it never holds some and waits for others.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {
            "num_gpus": self.gpus if self.backend == "cuda" else 0,
            "num_cpus": 0 if self.backend == "cuda" else self.gpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False),
        }
        if hasattr(actor, "beat"):
            options["max_concurrency"] = 2  # answers it during another call
        if self.accelerator:
            options["accelerator_type"] = self.accelerator
        return create_actor(actor, options, self.backend, *arguments)


def slots(backend: Backend, *, local: bool, gpus: int = 1) -> tuple[Slot, ...]:
    """The slots of the nodes that are alive. local: the cluster was started on this machine.

    gpus: of each slot; a node with fewer has none.
    """
    import ray

    free: list[Slot] = []
    for node in ray.nodes():
        if node["Alive"]:
            free.extend(_of_node(node, backend, local, gpus))
    return tuple(free if backend == "cuda" else free[:MAX_CPU_SLOTS])


def is_alive(node: str) -> bool:
    """Return True if a node of the cluster is still alive."""
    import ray

    return any(row["NodeID"] == node and row["Alive"] for row in ray.nodes())


@contextmanager
def ray_session(address: str, *, gpus: int | None) -> Iterator[None]:
    """Connect to Ray for the duration of the block.

    address: "local" starts Ray on this machine's loopback and stops it afterwards; any other joins
    that cluster, whose nodes need the dependencies of this program. gpus: of a local cluster;
    None: all that Ray detects. Raises MissingExtraError without Ray, InfrastructureError if it
    can't be started or reached.
    """
    require_extra("fleet", "--cluster")
    variables = _QUIET | (_LOOPBACK_ONLY if address == LOCAL else _token(address))
    with _environment(variables), _scratch_folder() as folder:
        import ray  # takes a second

        try:
            with _quiet_start():
                if address == LOCAL:
                    _start(folder, gpus)
                    _keep_private(Path.home() / _TOKEN_FILE)
                else:
                    _check_reachable(address)
                    _join(address)
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            ray.shutdown()
            raise InfrastructureError(_explain(address, error)) from error
        try:
            yield
        finally:
            ray.shutdown()


def _of_node(node: dict[str, Any], backend: Backend, local: bool, gpus: int) -> Iterator[Slot]:
    resources = node["Resources"]
    if backend == "cuda":
        count = int(resources.get("GPU", 0))
        names = [name for name in resources if name.startswith(_ACCELERATOR)]
        accelerator = names[0].removeprefix(_ACCELERATOR) if names and count else ""
    else:
        count, accelerator = (cpu_slots() if local else int(resources.get("CPU", 0))), ""
    for number in range(count // gpus):
        yield Slot(node["NodeID"], node["NodeManagerHostname"], number, backend, accelerator, gpus)


def _keep_private(token: Path) -> None:
    """Make Ray's token unreadable for other users: whoever has it can run code."""
    with suppress(OSError):
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)


def _check_reachable(address: str) -> None:
    """Raise OSError if the address does not accept connections: Ray itself retries for minutes."""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if address.startswith(_CLIENT) and not (host and port.isdigit()):
        raise ValueError("an address is ray://HOST:PORT")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


def _token(address: str) -> dict[str, str]:
    """Return environment variables with which Ray sends this machine's token to the cluster.

    A cluster requires a token if its head node had one when it started. Returns an empty dict if no
    token is to be sent.
    """
    has_token = _TOKENS & os.environ.keys() or (Path.home() / _TOKEN_FILE).is_file()
    may_require_token = address == "auto" or address.startswith(_CLIENT)
    if not may_require_token or _TOKEN_MODE in os.environ or not has_token:
        return {}
    return {_TOKEN_MODE: "token"}


def _start(folder: Path, gpus: int | None) -> None:
    import ray

    ray.init(
        address=LOCAL,
        num_cpus=max(cpu_slots(), gpus or 0),
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
    )


def _join(address: str) -> None:
    import ray

    give_up = time.monotonic() + _CLIENT_WAIT_S
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            if _CLIENT_FAILURE not in str(error) or time.monotonic() >= give_up:
                raise
            log.warning("%s; trying again", _explain(address, error))
            ray.shutdown()
            time.sleep(_CLIENT_PAUSE_S)
        else:
            return


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Silence Ray's warnings about its own defaults during the block."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    # Not under $TMPDIR: Ray creates Unix sockets in it, whose paths are limited to 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="fqb-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _explain(address: str, error: Exception) -> str:
    """Return what is wrong with a cluster, in one line, and what to do."""
    text = str(error)
    if _CLIENT_FAILURE in text:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return (
            f"the head node at {address} could not start a process for this client ({lines[-1]}): "
            "see ray_client_server*.err in /tmp/ray/session_latest/logs there, or start this on a "
            "node of the cluster with --cluster auto"
        )
    reason = library_reason(error)
    if _OTHER_VERSIONS in text:
        versions = " ".join(text.split()).removeprefix(_OTHER_VERSIONS)
        return (
            f"the Ray cluster at {address} has other versions than this machine: "
            f"{versions.strip(' :.')}: install the same version of Ray and of Python on both"
        )
    if address == LOCAL:
        return f"Ray did not start on this machine ({reason}): see `flexq-bench doctor`"
    token = ", that this machine has its token (~/.ray/auth_token)"
    return (
        f"no Ray cluster at {address} ({reason}): check that its head node runs (ray status)"
        f"{token}, or start one here with --cluster local"
    )
