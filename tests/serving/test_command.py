"""`flexq-bench serve-model` as a process: quantized, ended in the middle of an answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest
import torch

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {**os.environ, "FLEXQ_BENCH_CACHE": str(tmp_path_factory.mktemp("cache"))}


def start(*arguments, port, cache):
    command = [sys.executable, "-m", "flexq_bench", "serve-model", str(TINY), *arguments]
    command += ["--device", "cpu", "--port", str(port)]
    return subprocess.Popen(command, env=cache, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(process, port):
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                return json.load(answer)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("no answer in 300 s")


def client_of(port):
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
    )


def test_quantized_answers_equal_those_of_decode(port, cache, monkeypatch):
    from flexq_bench.cli import decoding
    from flexq_bench.decode.case import CachedScheme, Setup
    from flexq_bench.measure.tuning import Tuning
    from flexq_bench.serving.running import EngineOptions, prepared_engine

    process = start("--scheme", "flexq-w6ax", "--batch-limit", "4", port=port, cache=cache)
    try:
        wait_for(process, port)
        with client_of(port) as client:
            extra = {"return_tokens_as_token_ids": True, "ignore_eos": True}
            answer = client.completions.create(
                model="tiny-llama", prompt=[5, 17, 300], temperature=0, logprobs=0, extra_body=extra
            )
    finally:
        process.terminate()
        process.communicate(timeout=120)

    monkeypatch.setenv("FLEXQ_BENCH_CACHE", cache["FLEXQ_BENCH_CACHE"])
    scheme = CachedScheme("flexq-w6ax")
    folders = decoding.quantized(str(TINY), [scheme], "cpu", 0, None, capacity=32)
    setup = Setup(str(TINY), (scheme,), "cpu", checkpoints=folders)
    with prepared_engine(setup, Tuning.NONE, EngineOptions(1, 32, 32, 64, 0)) as prepared:
        ids = torch.tensor([[5, 17, 300]], dtype=torch.int32)
        tokens = prepared.engine.generate(ids, 16).tokens[0].tolist()
        content_hash = prepared.content_hash

    assert answer.choices[0].logprobs.tokens == [f"token_id:{token}" for token in tokens]
    assert answer.system_fingerprint == content_hash


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ended_server_ends_answers_and_leaves_nothing(port, cache, number):
    process = start(port=port, cache=cache)
    try:
        wait_for(process, port)
        with client_of(port) as client:
            answer = client.completions.create(
                model="tiny-llama", prompt=[5], max_tokens=250, stream=True
            )
            next(iter(answer))
            process.send_signal(number)
            with contextlib.suppress(openai.APIError):  # in the time of grace it may end well
                list(answer)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode in ((0,) if number == signal.SIGINT else (-number,))
    assert "Traceback" not in errors
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_taken_port_is_one_line(port, cache):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        process = start(port=port, cache=cache)
        _, errors = process.communicate(timeout=300)

    assert process.returncode == 2
    assert len(errors.strip().splitlines()) == 1
    assert str(port) in errors
