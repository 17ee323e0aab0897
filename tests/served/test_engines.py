"""Starting, awaiting and ending engines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.served import turns as turns_module
from flexq_bench.served.engines import EngineSpec, RunningEngine, engine, started
from flexq_bench.served.errors import EngineError

Command = Callable[[str], str]
Eventually = Callable[[Callable[[], object]], None]


def _listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def _alive(command: str) -> list[str]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if command in line]


def test_command_is_started_awaited_and_ended(command: Command):
    with started(engine("base", command("--loading-s 0.5"))) as running:
        assert running.model == "test-model"
        assert running.ready_s >= 0.4
        assert running.died() == ""

    assert not _listens(running.url)


def test_url_is_used_and_left_running(command: Command):
    with started(engine("base", command(""))) as running:
        with started(engine("head", running.url + "/v1/")) as same:
            assert (same.url, same.model) == (running.url, running.model)

        assert _listens(running.url)


def test_child_that_ignores_signals_ends_with_engine(
    command: Command, tmp_path: Path, eventually: Eventually
):
    answers = tmp_path / "marker.jsonl"  # its name marks the processes
    answers.write_text("")
    with started(engine("base", command(f"--child --answers {answers}"))):
        assert _alive(str(answers))

    eventually(lambda: not _alive(str(answers)))


@pytest.mark.slow
def test_killed_gate_leaves_no_engine(command: Command, tmp_path: Path):
    answers = tmp_path / "marker.jsonl"
    answers.write_text("")
    line = command(f"--child --answers {answers}")
    program = (
        "import sys, time\nfrom flexq_bench.served.engines import engine, started\n"
        f"with started(engine('base', {line!r})):\n    print('up', flush=True)\n    time.sleep(600)"
    )
    gate = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with gate:
        assert gate.stdout is not None
        assert gate.stdout.readline() == b"up\n"
        gate.kill()

    end = time.monotonic() + 30
    while _alive(str(answers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(str(answers))


def test_endless_log_keeps_its_last_line(tmp_path: Path):
    program = tmp_path / "prints.py"
    program.write_text("for _ in range(2000):\n    print('x' * 10_000)\nprint('no memory')")
    spec = engine("base", f"{sys.executable} {program} {{port}}")

    with pytest.raises(EngineError, match="exit code 0: no memory"), started(spec):
        pass


def test_engines_on_two_gpus_change_places(monkeypatch: pytest.MonkeyPatch):
    placed = []

    @contextmanager
    def recorded(spec: EngineSpec, *, gpu: str, **_: object) -> Iterator[RunningEngine]:
        placed.append((spec.name, gpu))
        yield RunningEngine(spec.name, "", "m", 0.0, lambda: "")

    monkeypatch.setattr(turns_module, "started", recorded)
    specs = (EngineSpec(name, command=("serve",)) for name in ("base", "head"))
    turns = turns_module.Turns(*specs, turns_module.Places(("0", "1")))
    for block in range(5):
        turns.place(block)
        for name in turns.order(block):
            turns.engine(name)

    assert placed[:4] == [("base", "0"), ("head", "1"), ("head", "0"), ("base", "1")]
    assert len(placed) == 6


def test_engine_that_dies_gives_last_line_of_log(command: Command):
    spec = engine("head", command("--no-such-option"))

    with pytest.raises(EngineError, match=r"head: .*exit code 2.*--no-such-option"), started(spec):
        pass


def test_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = engine("base", "server {port}", port=port)

        with pytest.raises(EngineError, match=rf"port {port} is taken"), started(spec):
            pass


def test_engine_not_ready_in_time_is_ended(command: Command, eventually: Eventually):
    spec = engine("base", command("--loading-s 60"))

    with pytest.raises(EngineError, match=r"not ready after 3 s.*503"):  # noqa: SIM117
        with started(spec, ready_within_s=3.0):
            pass

    eventually(lambda: not _alive("--loading-s 60"))


def test_missing_program_is_named():
    with (
        pytest.raises(EngineError, match="can't start no-such-program"),
        started(engine("base", "no-such-program {port}")),
    ):
        pass


def test_unknown_model_is_refused(command: Command):
    with (
        pytest.raises(EngineError, match="no model 'other': it has test-model"),
        started(engine("base", command("")), model="other"),
    ):
        pass


@pytest.mark.parametrize("text", ["vllm serve M", "", "http://", "A=1", "serve '{port}"])
def test_text_that_is_no_engine_is_refused(text: str):
    with pytest.raises(UsageError, match="base: "):
        engine("base", text)


def test_environment_gpu_and_braces_reach_command(tmp_path: Path):
    show = tmp_path / "show.py"
    show.write_text("import os, sys; print(sys.argv[2:], os.environ['A'])")
    text = f"A=x{{gpu}} {sys.executable} {show} {{port}} '{{\"b\": 1}}'"
    spec = engine("base", text)

    with pytest.raises(EngineError) as error, started(spec, gpu="3"):
        pass

    assert """['{"b": 1}'] x3""" in str(error.value)
    assert os.environ.get("A") is None


def test_key_is_sent_when_readiness_is_asked():
    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == "Bearer secret"
            known = known and self.path in ("/v1/models", "/health")
            self.send_response(200 if known else 404 if "/other/" in self.path else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}' if known else b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spec = engine("base", f"http://127.0.0.1:{server.server_port}")
        with started(spec, key="secret") as running:
            assert running.model == "m"
        other = engine("base", f"http://127.0.0.1:{server.server_port}/other")
        # These are known at once, without a wait for an engine that gets ready.
        for refused, reason in ((spec, "401: is the API key right"), (other, "answers 404")):
            with pytest.raises(EngineError, match=reason), started(refused, ready_within_s=600):
                pass
        server.shutdown()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"<html>", 200, "answers no list of models"),
        (b'{"data": [{"id": "a\\u001b[2J"}]}', 200, "can't be printed"),
        (b"", 307, "answers 307"),
    ],
    ids=["page", "name", "redirect"],
)
def test_url_of_something_else_is_named_at_once(body: bytes, status: int, reason: str):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", "/v1/")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spec = engine("base", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(EngineError, match=reason), started(spec, ready_within_s=600):
            pass
        server.shutdown()


def test_both_engines_end_if_the_end_of_one_is_interrupted(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    ended = []

    @contextmanager
    def interrupted(spec: EngineSpec, **_: object) -> Iterator[RunningEngine]:
        yield RunningEngine(spec.name, spec.url, "m", 0.0, lambda: "")
        ended.append(spec.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(turns_module, "started", interrupted)
    base, head = (engine(name, "http://127.0.0.1:1") for name in ("base", "head"))

    turns = turns_module.Turns(base, head, turns_module.Places())
    turns.engine("base")
    turns.engine("head")

    with pytest.raises(KeyboardInterrupt):
        turns.end()

    assert sorted(ended) == ["base", "head"]
