"""The server's process: a loaded model, its engine, and the HTTP server in front of it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from flexq_bench.decode.case import Setup, open_model
from flexq_bench.decode.continuous_batching import step_sizes
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.operations import DecodeWorkerOperations
from flexq_bench.decode.records import content_hash_of
from flexq_bench.decode.serving import prepare_all
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.measure.launcher import FreshProcess
from flexq_bench.measure.tuning import Tuning
from flexq_bench.read_api.browser_guard import allowed_hosts
from flexq_bench.serving import http_process
from flexq_bench.serving.app import ServedModel
from flexq_bench.serving.engine_link import EngineFacts, LinkedEngine
from flexq_bench.serving.engine_thread import EngineThread
from flexq_bench.serving.http_process import HttpSettings
from flexq_bench.serving.text import Vocabulary

_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """slots: sequences at a time. longest: tokens of each; None: `usual`, or the context if that
    is shorter. step_tokens: of prompts between two steps. max_waiting: sequences that may wait.
    """

    slots: int
    longest: int | None
    usual: int
    step_tokens: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine whose passes are captured.

    kernels: label of each layer. content_hash: of the checkpoint; None: it is none.
    """

    engine: Engine
    options: EngineOptions
    kernels: Mapping[str, str]
    content_hash: str | None


@contextmanager
def prepared_engine(
    setup: Setup, tuning: Tuning, options: EngineOptions
) -> Iterator[PreparedEngine]:
    """Load the setup's only scheme and prepare every pass of an engine; closed at the end.

    Raises UsageError if `decode` can't serve the model or the memory is not sufficient.
    """
    (cached,) = setup.schemes
    weights = setup.weights_of(cached.scheme)
    context = open_model(weights, cached.scheme, setup.seed).architecture.dimensions.context
    capacity = options.longest or min(options.usual, context)
    operations = DecodeWorkerOperations(setup.device, setup.seed)
    operations.check(weights, cached.scheme, options.slots, capacity, cached.kv_bits)
    sizes = step_sizes(options.slots)
    loaded = operations.load(weights, cached.scheme, sizes, capacity, tuning.value, setup.invariant)
    with operations.engine(options.slots, capacity, cached.kv_bits) as engine:
        prepare_all(engine, options.step_tokens)
        content_hash = content_hash_of(loaded, cached.kv_bits)
        yield PreparedEngine(engine, options, loaded["kernels"], content_hash)


def listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises UsageError if it can't."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(
            f"can't listen on {address}:{port} ({error.strerror or error}): give another --port"
        ) from None


@contextmanager
def linked_engine(
    prepared: PreparedEngine,
    name: str,
    vocabulary: Vocabulary,
    hosts: Sequence[str],
    *,
    on_failure: Callable[[], None] = lambda: None,
) -> Iterator[tuple[EngineThread, LinkedEngine, socket.socket]]:
    """Run a prepared engine; yields its thread, our end of the link, and that of `http_process`.

    name: of the model. hosts: of HttpSettings. on_failure: called if a pass fails.
    """
    engine, options = prepared.engine, prepared.options
    ours, theirs = socket.socketpair()

    def failed(error: InfrastructureError) -> None:
        link.fail(error)
        on_failure()

    vocabulary_size = engine.model.architecture.dimensions.vocab
    model = ServedModel(name, vocabulary, vocabulary_size, prepared.content_hash)
    facts = EngineFacts(engine.slots, engine.slots + options.max_waiting, engine.capacity)
    settings = HttpSettings(model, facts, hosts)
    with ours, theirs, closing(LinkedEngine(ours, settings)) as link:
        thread = EngineThread(engine, options.step_tokens, on_pass=link.flush, on_failure=failed)
        with closing(thread):
            yield thread, link, theirs


def serve_until_stopped(
    prepared: PreparedEngine,
    name: str,
    vocabulary: Vocabulary,
    address: str,
    port: int,
    host_names: Sequence[str],
) -> None:
    """Listen until a signal. Raises InfrastructureError if the engine or the HTTP server fails.

    The HTTP server is a process of its own: see engine_link.
    """
    hosts = allowed_hosts(address, host_names)
    received: list[int] = []
    with (
        listening_socket(address, port) as listening,
        linked_engine(
            *(prepared, name, vocabulary, hosts), on_failure=lambda: process.terminate()
        ) as (engine, link, theirs),
    ):
        files = (theirs.fileno(), listening.fileno())
        command = [sys.executable, "-m", http_process.__name__, *map(str, files)]
        process = FreshProcess(command, stdin=subprocess.DEVNULL, pass_fds=files)
        theirs.close()
        listening.close()

        def stop(number: int, _: object) -> None:
            process.kill() if received else process.terminate()
            received.append(number)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            link.receive(engine)
            process.wait()
        finally:
            process.kill()
            process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        if engine.failure is not None:
            raise engine.failure
        if not received:
            raise InfrastructureError(f"the HTTP server ended with {process.exit_reason()}")
    if received[0] == signal.SIGTERM:
        signal.raise_signal(received[0])
