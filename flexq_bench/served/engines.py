"""Engines: a URL of one that runs, or a command that is started here, awaited, and ended."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from flexq_bench.errors import UsageError, one_line
from flexq_bench.measure.launcher import FreshProcess
from flexq_bench.repository import descendants
from flexq_bench.repository.descendants import end_marked, new_mark
from flexq_bench.served.errors import EngineError

READY_S = 900.0  # large checkpoints are read and compiled for minutes
_HOST = "127.0.0.1"
_POLL_S = 0.2
_PROBE_S = 10.0  # for one question about readiness
_TERMINATE_S = 15.0  # between SIGTERM and SIGKILL
_KEY_REFUSED = (401, 403)
_BUSY = 429
_NO_ENGINE = 404  # also of what answers, but not as an engine
_MAX_BODY = 1 << 20  # bytes of an answer about readiness
_LOG_TAIL = 1 << 13  # bytes
_LOG_S = 0.5  # for the last of it, after an engine's end
_MAX_SHOWN = 200  # characters of a log's line
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine: `url` of a running one, or `command` to start one; exactly one of both.

    name: in messages and results, for example "base". command: arguments in which `{port}` and
    `{gpu}` are replaced. environment: variables in addition to this process's own. port: None: a
    free one.
    """

    name: str
    url: str = ""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None

    @property
    def is_started_here(self) -> bool:
        return bool(self.command)

    @property
    def label(self) -> str:
        """The engine as its user wrote it: its URL, or its command line."""
        variables = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return self.url or " ".join((*variables, shlex.join(self.command)))


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that answers. url: without /v1. model: the name to ask for. ready_s: 0: it ran.

    died: returns how its process ended, with the last line of its log; empty: it runs, or it was
    not started here.
    """

    name: str
    url: str
    model: str
    ready_s: float
    died: Callable[[], str]


def engine(name: str, text: str, *, port: int | None = None) -> EngineSpec:
    """Return the engine of a URL, or of a command such as `VAR=1 vllm serve M --port {port}`.

    Raises UsageError for a text that is neither.
    """
    text = text.strip()
    if re.match(r"https?://", text):
        parts = urlsplit(text)
        if not parts.hostname or parts.query or parts.fragment or parts.username:
            raise UsageError(f"{name}: {text!r} is no URL of an engine: http://HOST:PORT")
        return EngineSpec(name, url=text.rstrip("/").removesuffix("/v1"))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{name}: can't read the command {text!r}: {error}") from error
    variables: dict[str, str] = {}
    while words and (match := _VARIABLE.fullmatch(words[0])):
        variables[match[1]] = match[2]
        del words[0]
    if not words:
        raise UsageError(f"{name}: give a URL, or a command with {{port}}, got {text!r}")
    if not any("{port}" in word for word in (*words, *variables.values())):
        raise UsageError(
            f"{name}: the command has no {{port}}, so nobody knows where it answers: "
            f"{words[0]} … --port {{port}}"
        )
    return EngineSpec(name, command=tuple(words), environment=variables, port=port)


@contextmanager
def started(
    spec: EngineSpec,
    *,
    gpu: str | None = None,
    model: str | None = None,
    ready_within_s: float = READY_S,
    folder: Path | None = None,
    key: str | None = None,
) -> Iterator[RunningEngine]:
    """Start an engine unless it runs, wait until it answers, and end it with all its processes.

    gpu: index or UUID, the value of `{gpu}`; a command without `{gpu}` gets it as
    CUDA_VISIBLE_DEVICES. model: to ask for; None: the first of /v1/models. folder: the working
    directory. key: a bearer token. Raises EngineError if its port is taken, or it dies or is not
    ready in time.
    """
    if not spec.is_started_here:
        begun = time.monotonic()
        served_model = _await_ready(spec, spec.url, model, ready_within_s, lambda: "", key)
        yield RunningEngine(spec.name, spec.url, served_model, time.monotonic() - begun, lambda: "")
        return
    port = _free_port(spec)
    url = f"http://{_HOST}:{port}"
    mark = new_mark()
    begun = time.monotonic()
    values = {"{port}": str(port), "{gpu}": gpu or "0"}
    with _ended_with_us(mark), _start(spec, values, gpu, mark, folder) as process:
        try:
            log = _Log(process.stdout)

            def died() -> str:
                reason = process.exit_reason()
                return reason and f"{reason}: {log.last_line()}"

            served_model = _await_ready(spec, url, model, ready_within_s, died, key)
            yield RunningEngine(spec.name, url, served_model, time.monotonic() - begun, died)
        finally:
            _end(process, mark)


class _Log:
    """The end of what an engine prints, which may be gigabytes in a week."""

    def __init__(self, printed: IO[bytes] | None) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._read, args=(printed,), daemon=True)
        self._thread.start()

    def _read(self, printed: IO[bytes] | None) -> None:
        assert printed is not None
        with suppress(OSError, ValueError):  # it is closed once the engine has ended
            while part := os.read(printed.fileno(), _LOG_TAIL):
                self._tail = (self._tail + part)[-_LOG_TAIL:]

    def last_line(self) -> str:
        """Return the last line that says something; at most 200 characters."""
        self._thread.join(_LOG_S)  # the process ended; a child of it may still have the pipe
        text = _ESCAPES.sub("", self._tail.decode("utf-8", "replace"))
        lines = [" ".join(line.split()) for line in re.split(r"[\r\n]+", text)]
        return next((line[:_MAX_SHOWN] for line in reversed(lines) if line), "its log is empty")


@contextmanager
def _ended_with_us(mark: str) -> Iterator[None]:
    """Let a process end what has the mark when this one has ended, however it did."""
    command = [sys.executable, "-I", "-S", descendants.__file__, mark]
    with FreshProcess(command, stdin=subprocess.PIPE, start_new_session=True):
        yield


def _free_port(spec: EngineSpec) -> int:
    """Return the port to start at. Raises EngineError if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, spec.port or 0))
        except OSError as error:
            raise EngineError(
                f"{spec.name}: port {spec.port} is taken ({error.strerror}): end what listens "
                "there, or leave the port to us"
            ) from error
        port: int = probe.getsockname()[1]
        return port


def _start(
    spec: EngineSpec,
    values: Mapping[str, str],
    gpu: str | None,
    mark: str,
    folder: Path | None,
) -> FreshProcess:
    def filled(text: str) -> str:
        for name, value in values.items():  # other braces are the command's own, as in JSON
            text = text.replace(name, value)
        return text

    texts = (*spec.command, *spec.environment.values())
    environment = dict(os.environ)
    if gpu is not None and not any("{gpu}" in text for text in texts):
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    environment |= {name: filled(value) for name, value in spec.environment.items()}
    command = [filled(word) for word in spec.command]
    try:
        return FreshProcess(
            command,
            cwd=folder,
            env={**environment, mark: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all its processes get the signals
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise EngineError(f"{spec.name}: can't start {command[0]}: {reason}") from error


def _end(process: FreshProcess, mark: str) -> None:
    """End an engine's process group, and then all that it started elsewhere."""
    try:
        if process.poll() is None:
            process.signal_group(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_S)
    finally:
        process.signal_group(signal.SIGKILL)
        end_marked(mark)
        process.wait()


def _await_ready(
    spec: EngineSpec,
    url: str,
    model: str | None,
    within_s: float,
    died: Callable[[], str],
    key: str | None,
) -> str:
    """Return the model's name once the engine lists it and says that it is healthy."""
    end, state = time.monotonic() + within_s, "nothing listens"
    while True:
        if reason := died():
            raise EngineError(f"{spec.name}: the engine died with {reason}")
        status, names, state = _ready_models(url, key)
        if names:
            if reason := died():  # another program answers at its port
                raise EngineError(f"{spec.name}: the engine died with {reason}")
            if model is not None and model not in names:
                raise EngineError(
                    f"{spec.name}: {url} has no model {model!r}: it has {', '.join(names[:5])}"
                )
            return model or names[0]
        # What runs already does not learn its paths, and no engine another key, while we wait.
        is_other = 300 <= status < 500 and status != _BUSY
        if status in _KEY_REFUSED or (is_other and not spec.command):
            raise EngineError(f"{spec.name}: {url}: {state}")
        if time.monotonic() > end:
            raise EngineError(f"{spec.name}: {url} is not ready after {within_s:g} s: {state}")
        time.sleep(_POLL_S)


def _ready_models(url: str, key: str | None) -> tuple[int, list[str], str]:
    """Return the status of the list of an engine's models, 0: none; its names, empty if it is not
    ready; and its state.
    """
    status, body = _get(f"{url}/v1/models", key)
    if status in _KEY_REFUSED:
        return status, [], f"/v1/models answers {status}: is the API key right?"
    if status != 200:
        return status, [], f"/v1/models {body if status == 0 else f'answers {status}'}"
    health, _ = _get(f"{url}/health", key)
    if health == 503 or health == 0:
        state = "/health says that it is loading" if health else "/health does not answer"
        return status, [], state
    try:
        names = [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _NO_ENGINE, [], "/v1/models answers no list of models"
    if not all(map(str.isprintable, names)):
        return _NO_ENGINE, [], "/v1/models lists a name that can't be printed"
    return status, names, "" if names else "/v1/models lists no model"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _get(url: str, key: str | None) -> tuple[int, str]:
    """Return the status and body of a GET; status 0: no answer, the body is the reason."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        reply: http.client.HTTPResponse
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_PROBE_S) as reply:
            body, end = bytearray(), time.monotonic() + _PROBE_S
            while len(body) < _MAX_BODY and time.monotonic() < end:
                part = reply.read1(1 << 16)  # what is there: a body may come byte by byte
                if not part:
                    break
                body += part
            return 200, body.decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "reason", error)
        return 0, f"does not answer ({getattr(reason, 'strerror', None) or one_line(error)})"
    except Exception as error:  # http.client has errors of its own for what is no HTTP
        return 0, f"answers no HTTP ({type(error).__name__})"
