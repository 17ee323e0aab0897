"""serve-model under load next to its bare engine: greedy tokens, tokens/s, TTFT and TPOT.

    python benchmarks/decode/served.py MODEL --scheme flexq-w6ax --clients 1,32 --requests 128

The same requests (random prompts, lognormal lengths, no early end) are streamed by clients over
HTTP, and then served by `decode --serve`'s engine in this process. Tokens of one client must equal
those of requests served one at a time; with more, batches differ, and with them rounding errors,
unless --invariant is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

from flexq_bench.accuracy.loading import load_tokenizer
from flexq_bench.cli import decoding
from flexq_bench.decode.case import Setup
from flexq_bench.decode.requests import ServingRequest, drawn_requests
from flexq_bench.decode.serving import serve
from flexq_bench.measure.tuning import Tuning
from flexq_bench.schemes.model_files import model_at
from flexq_bench.serving.running import EngineOptions, prepared_engine

_STEP_TOKENS = 512


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Streamed:
    """An answer: its tokens, and seconds from the request to each of them."""

    tokens: list[int]
    at_s: list[float]


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """Start the server; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "flexq_bench", "serve-model", options.model]
    command += ["--scheme", options.scheme, "--port", str(port), "--no-tune"]
    command += ["--batch-limit", str(options.slots), "--longest", str(options.longest)]
    command += [] if options.device is None else ["--device", options.device]
    command += ["--invariant"] if options.invariant else []
    began = time.perf_counter()
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                sys.exit(f"the server ended with {process.returncode}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                break
        say(f"ready after {time.perf_counter() - began:.1f} s")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


async def stream(
    session: aiohttp.ClientSession, model: str, prompt: list[int], new: int
) -> Streamed:
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
    extra = {"ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    began, tokens, at_s = time.perf_counter(), list[int](), list[float]()
    async with session.post("/v1/completions", json=body | extra) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                tokens += [int(name[9:]) for name in choice["logprobs"]["tokens"]]
                at_s.append(time.perf_counter() - began)
    return Streamed(tokens, at_s)


async def load(
    url: str, prompts: list[list[int]], requests: list[ServingRequest], clients: int
) -> tuple[list[Streamed], float]:
    """Closed loop of `clients`; returns the answers and the seconds."""
    answers: dict[int, Streamed] = {}
    waiting = iter(range(len(requests)))
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        async with session.get("/v1/models") as response:
            model: str = (await response.json())["data"][0]["id"]

        async def client() -> None:
            for i in waiting:
                new = requests[i].new_tokens
                answers[i] = await stream(session, model, prompts[i], new)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        took = time.perf_counter() - began
    return [answers[i] for i in range(len(requests))], took


def bare(
    options: argparse.Namespace,
    prompts: list[list[int]],
    requests: list[ServingRequest],
    alone: int,
) -> tuple[list[list[int]], list[list[int]], float]:
    """Tokens and seconds of the engine, as `decode --serve` runs it; and tokens of the first
    `alone` requests, one at a time.
    """
    scheme = decoding.requested_schemes(options.model, options.scheme, None, calibrated=False)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    checkpoints = decoding.quantized(
        options.model, scheme, device, 0, None, capacity=options.longest
    )
    setup = Setup(
        options.model, scheme, device, checkpoints=checkpoints, invariant=options.invariant
    )
    chosen = EngineOptions(options.slots, options.longest, options.longest, _STEP_TOKENS, 0)
    with prepared_engine(setup, Tuning.NONE, chosen) as prepared:
        table = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int32)
        for row, prompt in zip(table, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        run = serve(prepared.engine, requests, table.to(device), _STEP_TOKENS)
        singles = [
            serve(prepared.engine, [requests[i]], table[i : i + 1].to(device), _STEP_TOKENS)
            for i in range(alone)
        ]
        tokens = [answer.tolist() for answer in run.answers]
        return tokens, [single.answers[0].tolist() for single in singles], run.seconds


def described(name: str, answers: list[Streamed], seconds: float) -> dict[str, Any]:
    count = sum(len(answer.tokens) for answer in answers)
    gaps = [
        (answer.at_s[-1] - answer.at_s[0]) / (len(answer.at_s) - 1)
        for answer in answers
        if len(answer.at_s) > 1
    ]
    return {
        "clients": name,
        "tokens_per_s": round(count / seconds, 1),
        "ttft_ms": round(1000 * statistics.median(answer.at_s[0] for answer in answers), 2),
        "tpot_ms": round(1000 * statistics.median(gaps), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--scheme", default="fp16")
    parser.add_argument("--device")
    parser.add_argument("--clients", default="1,32")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--invariant", action="store_true")
    options = parser.parse_args()
    requests = drawn_requests(options.requests, options.longest, 0)
    vocabulary = len(load_tokenizer(model_at(Path(options.model))))
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(vocabulary, (request.prompt_tokens,), generator=generator).tolist()
        for request in requests
    ]
    streamed: dict[int, list[Streamed]] = {}
    with served(options) as url:
        for clients in map(int, options.clients.split(",")):
            few = min(len(requests), 8 * clients)
            answers, seconds = asyncio.run(load(url, prompts[:few], requests[:few], clients))
            streamed[clients] = answers
            say(options.scheme, json.dumps(described(str(clients), answers, seconds)))
    most = max(map(len, streamed.values()))
    alone = len(streamed.get(1, ()))
    tokens, singles, seconds = bare(options, prompts[:most], requests[:most], alone)
    say(options.scheme, f"bare engine: {sum(map(len, tokens)) / seconds:.1f} tokens/s")
    for clients, answers in streamed.items():
        expected = singles if clients == 1 else tokens[: len(answers)]
        equal = sum(a.tokens == b for a, b in zip(answers, expected, strict=True))
        say(options.scheme, f"{clients} clients: {equal} of {len(answers)} answers are equal")


if __name__ == "__main__":
    main()
