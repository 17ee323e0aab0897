"""`gate served` on our own engine: schemes of a model, and an engine with a seeded defect.

    python benchmarks/served/own_engine.py MODEL --text FILE [--scheme flexq-w6ax] [--device cpu]
        [--gates scheme,same,scale,delay] [--questions 800] [--tokens 192] [--out DIR]

Starts `serve-model` for each engine that the gates need, all on one GPU, where they take turns:

- scheme: the scheme against fp16
- same: the scheme against another process of it, accuracy and speed; must pass
- scale: the scheme against itself with one kernel's output x 1.5 where a launch has more than 64
  tokens; must fail
- delay: the scheme against itself with every pass longer by --delay-percent; must fail by TPOT.
  Two processes of it are gated twice, each of them delayed once, so that the mean of both estimates
  is that of the delay, whatever the processes differ by

Questions are the next words of FILE after --words words, answered greedily. Prints a row for each
gate and writes its report to DIR. Exit code 1: a gate that must pass or fail did not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FULL_PRECISION, SAME, SCALE, DELAY = "fp16", "same", "scale", "delay"
OTHER = "other"  # process of the scheme
_FIRST_WRONG = 65  # tokens of a launch
_FACTOR = 1.5
_READY_S = 600.0
_FEWEST_CORES = 4  # with which the engine's thread has one of its own, and the next, its sibling
_ESTIMATE = re.compile(r"median_tpot: \w+: ([-+][0-9.]+)%")
_ACCURACY = """version = 1
concurrency = {concurrency}
[[accuracy]]
suite = "questions.jsonl"
checker = "regex"
max_tokens = 4
detect_points = {points}
[faults]
detect_points = 5.0
[kl]
mean = {kl}
"""
_SPEED = """version = 1
power = 0.9
[[speed]]
name = "steps"
lengths = "fixed"
prompt_tokens = 32
new_tokens = {tokens}
arrivals = "closed"
concurrency = {concurrency}
requests = {requests}
warmup_requests = {requests}
cooldown_s = 0.05
metrics = ["median_tpot"]
worse_percent = 1.0
"""


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Gate:
    """A pair of engines by name. right: exit codes that are; empty: any. delays: head is late."""

    name: str
    base: str
    head: str
    policy: str
    right: frozenset[int]
    delays: bool = False


def questions(text: str, count: int, words: int) -> Iterator[dict[str, str]]:
    """Yield contexts of so many words from a text, and the word that comes next."""
    every = text.split()
    starts = list(range(0, len(every) - words - 1, words + 1))
    random.Random(0).shuffle(starts)
    found = 0
    for start in starts:
        answer = every[start + words]
        if found < count and answer.isalpha():
            found += 1
            prompt = " ".join(every[start : start + words])
            yield {"prompt": prompt, "answer": rf"^\s*{re.escape(answer)}\b"}


def damage_scale(scheme: str) -> None:
    """Let one kernel of a scheme compute too much in launches of many tokens."""
    from flexq_bench.accuracy.setup import best_device
    from flexq_bench.kernels.registry import resolve
    from flexq_bench.schemes import registry

    backend: Any = "cpu" if best_device() == "cpu" else "cuda"
    layers = registry.layer_kernels(registry.resolve(scheme), gated=True)
    label = next(layer.kernel for layer in layers if layer.kernel)
    kernel: Any = resolve(label, backend)
    inside: list[str] = []  # linear may call gemm

    def damaged(name: str, place: int) -> None:
        run = getattr(kernel, name)

        def call(*arguments: Any, **named: Any) -> Any:
            inside.append(name)
            try:
                result = run(*arguments, **named)
            finally:
                inside.pop()
            out = arguments[place] if result is None else result
            if not inside and out.shape[0] >= _FIRST_WRONG:
                out *= _FACTOR
            return result

        setattr(kernel, name, call)

    damaged("gemm", 2)
    damaged("linear", 3)


def damage_speed(percent: float) -> None:
    """Let every pass of the engine end later by a share of the time since the last one's end.

    SIGUSR1 begins that, and ends it with a line of what it added. The engine's thread has a core of
    its own.
    """
    from flexq_bench.serving.engine_thread import EngineThread

    run = EngineThread._pass
    ended, is_late, passed, added = time.perf_counter(), False, 0.0, 0.0
    every = sorted(os.sched_getaffinity(0))
    own = set(every[:1]) if len(every) >= _FEWEST_CORES else set()
    if own:
        os.sched_setaffinity(0, every[2:])  # what starts from now on inherits it

    def change(*_: object) -> None:
        nonlocal is_late, passed, added
        if is_late:
            say(f"{passed:.2f} s of passes, {100 * added / max(passed, 1e-9):.3f} % more by delays")
        is_late, passed, added = not is_late, 0.0, 0.0

    def delayed(self: EngineThread, iteration: Any) -> None:
        nonlocal ended, passed, added, own
        if own:
            os.sched_setaffinity(0, own)
            own = set()
        run(self, iteration)
        now = time.perf_counter()
        took = min(now - ended, 0.2)
        ended = now
        if is_late:
            while ended < now + took * percent / 100:
                ended = time.perf_counter()
            passed, added = passed + took, added + ended - now

    signal.signal(signal.SIGUSR1, change)
    EngineThread._pass = delayed  # type: ignore[method-assign]


def serve_damaged(damage: str, options: argparse.Namespace, rest: list[str]) -> int:
    """Damage this process, and serve."""
    from flexq_bench.cli.app import main as flexq_bench

    if damage == SCALE:
        damage_scale(options.scheme)
    else:
        damage_speed(options.delay_percent)
    return flexq_bench(rest)


@contextmanager
def engine(
    name: str, options: argparse.Namespace, logs: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start an engine without waiting until it is ready; yields its URL and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scheme = FULL_PRECISION if name == FULL_PRECISION else options.scheme
    command = ["serve-model", options.model, "--scheme", scheme, "--port", str(port)]
    command += ["--batch-limit", str(options.slots), "--name", "model"]
    command += ["--longest", str(128 + options.tokens)]
    command += ["--no-tune"] if options.no_tune else []
    command += ["--device", options.device] if options.device else []
    own = [sys.executable, "-m", "flexq_bench", *command]
    if name != FULL_PRECISION:
        damage = SCALE if name == SCALE else DELAY
        own = [sys.executable, *sys.argv, "--serve-damaged", damage, "--", *command]
    with (logs / f"engine-{name}.log").open("w") as log:
        process = subprocess.Popen(own, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_ready(engines: dict[str, tuple[str, subprocess.Popen[bytes]]]) -> None:
    """Wait for /health of all engines."""
    began = time.monotonic()
    for name, (url, process) in engines.items():
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > began + _READY_S:
                    sys.exit(f"{name} is not ready: see engine-{name}.log in --out")
                time.sleep(0.1)
    say(f"{len(engines)} engines are ready after {time.monotonic() - began:.0f} s")


def judge(
    gate: Gate, engines: dict[str, tuple[str, subprocess.Popen[bytes]]], folder: Path, out: Path
) -> tuple[bool, float]:
    """Run a gate; prints its row. Returns whether it ended as it must, and ln(TPOT's ratio)."""
    (base, _), (head, process) = engines[gate.base], engines[gate.head]
    report = out / f"{gate.name}-{gate.policy}{'-swapped' * (gate.base == OTHER)}"
    command = [sys.executable, "-m", "flexq_bench", "gate", "served"]
    command += ["--policy", str(folder / f"{gate.policy}.toml"), "--base", base, "--head", head]
    command += ["--db", str(out / "gates.sqlite")]
    command += ["--base-label", gate.base, "--head-label", gate.head]
    began = time.monotonic()
    if gate.delays:
        process.send_signal(signal.SIGUSR1)
    ended = subprocess.run(command, capture_output=True, text=True)
    if gate.delays:
        process.send_signal(signal.SIGUSR1)
    seconds = time.monotonic() - began
    report.with_suffix(".txt").write_text(ended.stdout + ended.stderr)
    right = not gate.right or ended.returncode in gate.right
    verdict = next((x for x in ended.stdout.splitlines() if x.strip()), "")
    estimate = _ESTIMATE.search(ended.stdout)
    change = float(estimate[1]) if estimate else math.nan
    tpot = f", TPOT {change:+.2f} %" if estimate else ""
    say(
        f"{gate.name}, {gate.policy}: {gate.head} against {gate.base}: exit {ended.returncode}, "
        f"{seconds:.0f} s{tpot}, {'right' if right else 'WRONG'}: {verdict}"
    )
    return right, math.log1p(change / 100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--scheme", default="flexq-w6ax")
    parser.add_argument("--device")
    parser.add_argument("--gates", default=f"scheme,{SAME},{SCALE},{DELAY}")
    parser.add_argument("--questions", type=int, default=800)
    parser.add_argument("--words", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=192, help="of an answer whose speed counts")
    parser.add_argument("--requests", type=int, default=2, help="of a segment")
    # With many streams the HTTP process is as slow as the passes of a small model, and varies more.
    parser.add_argument("--concurrency", type=int, default=1, help="of requests whose speed counts")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--points", type=float, default=6.0, help="loss of the scheme to detect")
    parser.add_argument("--kl", type=float, default=0.5, help="of the scheme, nats a token")
    parser.add_argument("--delay-percent", type=float, default=3.0)
    parser.add_argument("--no-tune", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve-damaged", choices=(SCALE, DELAY), help=argparse.SUPPRESS)
    given = [*sys.argv[1:], "--"]
    options = parser.parse_args(given[: given.index("--")])
    if options.serve_damaged:
        return serve_damaged(options.serve_damaged, options, given[given.index("--") + 1 : -1])
    passes, fails = frozenset({0}), frozenset({1})
    every = [
        Gate("scheme", FULL_PRECISION, options.scheme, "scheme", frozenset()),
        Gate(SAME, options.scheme, OTHER, "own", passes),
        Gate(SCALE, options.scheme, SCALE, "own", fails),
        Gate(DELAY, options.scheme, OTHER, "speed", fails, delays=True),
        Gate(DELAY, OTHER, options.scheme, "speed", fails, delays=True),
        Gate(SAME, options.scheme, OTHER, "speed", passes),
    ]
    gates = [gate for name in options.gates.split(",") for gate in every if gate.name == name]
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder, out = Path(name), options.out or Path(name)
        lines = questions(options.text.read_text(), options.questions, options.words)
        written = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "questions.jsonl").write_text(written)
        concurrency = options.slots
        for policy, points, kl in (("scheme", options.points, options.kl), ("own", 3.0, 0.02)):
            text = _ACCURACY.format(concurrency=concurrency, points=points, kl=kl)
            (folder / f"{policy}.toml").write_text(text)
        speed = _SPEED.format(
            tokens=options.tokens, requests=options.requests, concurrency=options.concurrency
        )
        (folder / "speed.toml").write_text(speed)
        needed = dict.fromkeys(side for gate in gates for side in (gate.base, gate.head))
        engines = {side: stack.enter_context(engine(side, options, out)) for side in needed}
        every_core = sorted(os.sched_getaffinity(0))
        if len(every_core) >= _FEWEST_CORES:
            os.sched_setaffinity(0, every_core[2:])  # of what asks the engines
        wait_until_ready(engines)
        judged = [(gate, *judge(gate, engines, folder, out)) for gate in gates]
    if late := [change for gate, _, change in judged if gate.delays]:
        mean = 100 * math.expm1(sum(late) / len(late))
        say(f"a delay of {options.delay_percent:g} %: {mean:+.2f} %")
    return 0 if all(right for _, right, _ in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
