"""Starting Ray on this machine, or joining a cluster, and leaving nothing behind."""

from __future__ import annotations

import logging
import os
import shutil
import site
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexq_bench.errors import InfrastructureError
from flexq_bench.repository.provenance import ROOT

LOCAL = "local"
MAX_CPU_SLOTS = 4
_OBJECT_STORE_BYTES = 128 << 20  # what travels is a case or a result, some hundred kilobytes
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Ray replaces 127.0.0.1 by an address that others reach, except where clusters of several machines
# are switched off: that is this variable's meaning, on any system. Read when ray is imported.
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

_CLIENT = "ray://"
_ANSWER_S = 10.0
_TOKEN_MODE = "RAY_AUTH_MODE"
_TOKEN_FILE = ".ray/auth_token"
_TOKENS = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def cpu_slots() -> int:
    """Actors that measure side by side on this machine's CPU."""
    return min(len(os.sched_getaffinity(0)), MAX_CPU_SLOTS)


@contextmanager
def ray_session(address: str, *, gpus: int | None) -> Iterator[None]:
    """Ray connected for the length of the block.

    address: "local" starts Ray on this machine's loopback and stops it afterwards; another one
    joins that cluster, whose nodes have this package installed. gpus: how many to offer locally;
    None: those Ray finds. Raises InfrastructureError if Ray can't be started or reached.
    """
    variables = _QUIET | (_LOOPBACK_ONLY if address == LOCAL else _token(address))
    with _environment(variables), _scratch_folder() as folder:
        import ray  # a second of import that only this needs

        try:
            with _quiet_start():
                if address == LOCAL:
                    _start(folder, gpus)
                    _keep_private(Path.home() / _TOKEN_FILE)
                else:
                    _check_reachable(address)
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            ray.shutdown()
            raise InfrastructureError(_explain(address, error)) from error
        try:
            yield
        finally:
            ray.shutdown()


def _keep_private(token: Path) -> None:
    """Let nobody else read the token that Ray makes, which lets who has it run code."""
    with suppress(OSError):
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)


def _check_reachable(address: str) -> None:
    """Raise OSError if nobody listens there: Ray itself tries for many minutes."""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if address.startswith(_CLIENT) and not (host and port.isdigit()):
        raise ValueError("an address is ray://HOST:PORT")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()


def _token(address: str) -> dict[str, str]:
    """Return variables that make Ray send this machine's token to a cluster that may require one.

    A cluster requires a token if its head had one when it started.
    """
    has_one = _TOKENS & os.environ.keys() or (Path.home() / _TOKEN_FILE).is_file()
    may_ask = address == "auto" or address.startswith(_CLIENT)
    if not may_ask or _TOKEN_MODE in os.environ or not has_one:
        return {}
    return {_TOKEN_MODE: "token"}


def _start(folder: Path, gpus: int | None) -> None:
    import ray

    # Workers inherit the environment of the processes started here: in a checkout that nobody
    # installed they find the packages where this process did.
    with _environment({"PYTHONPATH": _python_path()}):
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


def _python_path() -> str:
    before = os.environ.get("PYTHONPATH", "")
    if str(ROOT) in site.getsitepackages():
        return before
    return os.pathsep.join(filter(None, (str(ROOT), before)))


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Ray announces its defaults, now and later, as warnings; none is about what a user did."""
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
    # Ray puts Unix sockets below it, whose paths may have 107 characters: not under $TMPDIR.
    folder = Path(tempfile.mkdtemp(prefix="fqb-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _explain(address: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if address == LOCAL:
        return f"Ray did not start on this machine ({reason}): see `flexq-bench doctor`"
    token = ", that this machine has its token (~/.ray/auth_token)"
    return (
        f"no Ray cluster at {address} ({reason}): check that it runs (ray status)"
        f"{token}, or start one here with --cluster local"
    )
