"""The server's process: a loaded model, its engine, and the HTTP server in front of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import uvicorn

from flexq_bench.decode.case import Setup, open_model
from flexq_bench.decode.continuous_batching import step_sizes
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.operations import DecodeWorkerOperations
from flexq_bench.decode.records import content_hash_of
from flexq_bench.decode.serving import prepare_all
from flexq_bench.measure.tuning import Tuning
from flexq_bench.read_api.browser_guard import DATA_POLICY, BrowserGuard, allowed_hosts
from flexq_bench.serving.app import ServedModel, serving_app
from flexq_bench.serving.engine_thread import EngineThread
from flexq_bench.serving.text import Vocabulary

_GRACE_S = 2  # for answers that are on their way when the server is stopped


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


def http_server(
    prepared: PreparedEngine,
    engine: EngineThread,
    name: str,
    vocabulary: Vocabulary,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    host_names: Sequence[str] = (),
) -> uvicorn.Server:
    """Return a server that is not started. name: of the model. host_names: as in allowed_hosts."""
    dimensions = prepared.engine.model.architecture.dimensions
    served = ServedModel(name, vocabulary, dimensions.vocab, prepared.content_hash)
    app = serving_app(served, engine)
    config = uvicorn.Config(
        BrowserGuard(app, allowed_hosts(address, host_names), DATA_POLICY),
        host=address,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
    )
    return uvicorn.Server(config)


def serve_until_stopped(
    prepared: PreparedEngine,
    name: str,
    vocabulary: Vocabulary,
    address: str,
    port: int,
    host_names: Sequence[str],
) -> None:
    """Listen until a signal. Raises InfrastructureError if the engine fails."""
    options = prepared.options

    def stop() -> None:
        server.should_exit = True

    with closing(
        EngineThread(prepared.engine, options.step_tokens, options.max_waiting, stop)
    ) as engine:
        server = http_server(
            *(prepared, engine, name, vocabulary),
            address=address,
            port=port,
            host_names=host_names,
        )
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after a graceful end
            server.run()
        if engine.failure is not None:
            raise engine.failure
