"""A server of the example model on a CPU, in this process, asked by the public client."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from flexq_bench.decode.case import CachedScheme, Setup
from flexq_bench.measure.tuning import Tuning
from flexq_bench.serving.http_process import serve
from flexq_bench.serving.loading import load_vocabulary
from flexq_bench.serving.running import (
    EngineOptions,
    PreparedEngine,
    linked_engine,
    listening_socket,
    prepared_engine,
)
from flexq_bench.serving.text import Vocabulary

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """A running server. engine: the bare engine, which its thread runs."""

    url: str
    prepared: PreparedEngine
    vocabulary: Vocabulary

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def complete(self, prompt: Any, **parameters: Any) -> Any:
        """A completion, or its events, by a new client; greedy unless stated otherwise."""
        parameters = {"temperature": 0, "max_tokens": 24, **parameters}
        with self.client() as client:
            answer = client.completions.create(model="tiny", prompt=prompt, **parameters)
            return list(answer) if parameters.get("stream") else answer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model with a chat template."""
    folder = tmp_path_factory.mktemp("serving") / "tiny"
    shutil.copytree(TINY, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    return folder


@pytest.fixture(scope="session")
def untrained_chat() -> Path:
    """The example model as it is, without a chat template."""
    return TINY


@pytest.fixture(scope="session")
def start(model: Path) -> Iterator[Callable[..., Served]]:
    """start(slots=8, max_waiting=64): start a server; it ends with the session."""
    with ExitStack() as stack:

        def started(
            *, slots: int = 32, max_waiting: int = 64, folder: Path = model, name: str = "tiny"
        ) -> Served:
            setup = Setup(str(folder), (CachedScheme("fp16"),), "cpu")
            options = EngineOptions(slots, None, 2048, 64, max_waiting)
            prepared = stack.enter_context(prepared_engine(setup, Tuning.NONE, options))
            vocabulary = load_vocabulary(folder)
            listening = stack.enter_context(listening_socket("127.0.0.1", 0))
            linked = linked_engine(prepared, name, vocabulary, ("localhost",))
            thread, link, theirs = stack.enter_context(linked)
            serving = threading.Thread(target=lambda: asyncio.run(serve(theirs, listening)))
            receiving = threading.Thread(target=link.receive, args=(thread,))

            def end() -> None:
                theirs.shutdown(socket.SHUT_RDWR)
                serving.join()
                receiving.join()

            for one in (serving, receiving):
                one.start()
            stack.callback(end)
            port = listening.getsockname()[1]
            return Served(f"http://127.0.0.1:{port}", prepared, vocabulary)

        yield started


@pytest.fixture(scope="session")
def served(start: Callable[..., Served]) -> Served:
    return start()


@pytest.fixture(scope="session")
def greedy(model: Path) -> Iterator[Callable[[list[int], int], list[int]]]:
    """greedy(prompt, new): tokens that `decode` makes of a prompt, in an engine of its own."""
    setup = Setup(str(model), (CachedScheme("fp16"),), "cpu")
    options = EngineOptions(1, None, 2048, 64, 0)
    with prepared_engine(setup, Tuning.NONE, options) as prepared:

        def decoded(prompt: list[int], new: int) -> list[int]:
            ids = torch.tensor([prompt], dtype=torch.int32)
            tokens: list[int] = prepared.engine.generate(ids, new).tokens[0].tolist()
            return tokens

        yield decoded
