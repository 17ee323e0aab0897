"""Operations of a worker on a real device, the CPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest

from flexq_bench.measure import PROTOCOL_CPU, Meter
from flexq_bench.measure.ab import InterleaveRules, compare_kernels
from flexq_bench.measure.ab.operations import WorkerOperations
from flexq_bench.measure.ab.worker import OPERATIONS
from flexq_bench.measure.clocks import Batch, _CpuRotation
from flexq_bench.measure.protocol import WarmUp
from flexq_bench.measure.worker_server import serve
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import Case

FP16 = "cublas-fp16 gemm hot m1n32k32"
FAST = replace(
    PROTOCOL_CPU,
    warm_up=WarmUp(0.0, 0.005, agreement=1.0),
    rewarm=WarmUp(0.0, 0.005, agreement=1.0),
    retune=WarmUp(0.0, 0.005, agreement=1.0),
    batch_s=0.001,
)


@pytest.fixture
def operations():
    meter = Meter("cpu", FAST)
    with meter.device_guard():
        yield WorkerOperations(meter)


@pytest.fixture
def answers(operations):
    def ask(*messages: dict[str, object]) -> list[dict[str, object]]:
        numbered = [{"id": i, **message} for i, message in enumerate(messages)]
        requests = "\n".join(map(json.dumps, numbered)).encode()
        with tempfile.TemporaryFile() as replies:
            serve(operations, io.BytesIO(requests), replies, OPERATIONS)
            replies.seek(0)
            return [json.loads(line) for line in replies]

    return ask


class _Relaying:
    """Code in the process that puts a pipe of its own in the place of that of the replies."""

    def __init__(self, replies):
        self._replies = replies

    def measure(self):
        _, end = os.pipe()
        os.dup2(end, self._replies.fileno())
        os.close(end)
        return {"median_us": 7.0}


def test_replaced_pipe_of_replies_ends_the_worker(tmp_path):
    with (tmp_path / "replies").open("wb") as replies, pytest.raises(SystemExit, match="the pipe"):
        serve(_Relaying(replies), [b'{"id": 1, "do": "measure"}'], replies, ("measure",))


class _Forking:
    """Code in the process that makes a second one of it."""

    def measure(self):
        self.copy = os.fork()
        return {"median_us": 7.0}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_worker_replies_once(tmp_path):
    operations = _Forking()

    with (tmp_path / "replies").open("wb") as replies:
        serve(operations, [b'{"id": 1, "do": "measure"}'], replies, ("measure",))
        os.waitpid(operations.copy, 0)

    assert (tmp_path / "replies").read_text().count("median_us") == 1


def test_case_is_prepared_placed_timed_and_checked(answers):
    replies = answers(
        {"do": "prepare", "slot": "base", "case": FP16},
        {"do": "place", "slot": "base", "index": 0},
        {"do": "turn", "slot": "base"},
        {"do": "leave", "slot": "base"},
        {"do": "release", "slot": "base"},
    )

    prepared, placed, turn, left, _ = (reply["reply"] for reply in replies)
    assert [reply["id"] for reply in replies] == list(range(5))
    assert prepared.pop("secret") < 1 << 52
    assert set(prepared.pop("formats").values()) == {"fp16"}
    assert 0 < prepared.pop("max_rel_error") < 1e-3
    assert prepared == {"config": {}, "binary": None, "wrong": "", "copies": 1}
    assert placed == {"copies": 1, "shared": False}
    assert all(time > 0 for time in turn["samples_us"])
    assert (turn["valid"], turn["mhz"], left) == (True, None, {"wrong": "", "failed": None})


@pytest.mark.parametrize(("given", "repeats"), [({}, False), ({"distinct": False}, True)])
def test_copies_have_own_contents_unless_they_may_repeat(given, repeats):
    meter = Meter("cpu", replace(FAST, min_cache_factor=0.02, cache_factor=0.02))
    with meter.device_guard():
        operations = WorkerOperations(meter)
        operations.prepare("base", "cublas-fp16 gemm cold m1n32k32", {}, **given)
        copies = operations.place("base", 0)["copies"]
        contents = operations._slots["base"].buffers.weights.current

    assert copies > 2
    assert len({id(content) for content in contents}) == (2 if repeats else copies)


def at_clocks(monkeypatch, of_gap):
    """A clock for each sample of a CPU: that of its gap, in lengths of a sample of 1 ms."""
    sample = _CpuRotation.sample

    def clocked(rotation, count, *, gap_us=0.0):
        sample(rotation, 1)
        launch_us = 1000.0 / rotation.launches
        return Batch((launch_us,) * count, (of_gap(gap_us / 1000.0),) * count)

    monkeypatch.setattr(_CpuRotation, "sample", clocked)


def test_only_a_clock_below_that_of_the_placement_is_invalid(
    monkeypatch,
):
    """Its clock was 4 % higher with the longest gaps while the device was cold."""
    mhz = {"now": 1950.0}
    at_clocks(monkeypatch, lambda gap: mhz["now"] if gap > 10 else min(mhz["now"], 1870.0))
    meter = Meter("cpu", replace(FAST, gaps=(2.0, 6.0, 18.0)))
    with meter.device_guard():
        operations = WorkerOperations(meter)
        operations.prepare("base", FP16)
        operations.place("base", 0)
        mhz["now"] = 1870.0
        operations.place("base", 1)
        usual = operations.turn("base")
        mhz["now"] = 1750.0
        throttled = operations.turn("base")

    assert (usual["mhz"], usual["valid"]) == (1870.0, True)
    assert (throttled["mhz"], throttled["valid"]) == (1750.0, False)


@pytest.mark.parametrize(("other", "shared"), [("cublas-fp16", True), ("flexq-w6a6", False)])
def test_weights_of_equal_bytes_are_shared(operations, other, shared):
    operations.prepare("base", FP16)
    operations.prepare("head", FP16.replace("cublas-fp16", other))
    operations.place("base", 0)

    assert operations.place("head", 0, beside="base")["shared"] is shared


@pytest.mark.parametrize(
    ("following", "index", "again"), [("m8n32k32", 0, True), ("m8n64k32", 0, False), ("", 1, False)]
)
def test_next_case_of_a_layer_has_the_same_copies(operations, following, index, again):
    operations.prepare("base", FP16, shares=True)
    operations.place("base", 0)
    before = operations._copies["base"]
    operations.leave("base")
    if following:
        operations.prepare("base", f"cublas-fp16 gemm hot {following}", shares=True)

    operations.place("base", index)

    assert (operations._copies["base"] is before) is again
    operations.turn("base")
    assert operations.leave("base")["wrong"] == ""


def test_configuration_of_another_kernel_is_refused(answers):
    (reply,) = answers({"do": "prepare", "slot": "base", "case": FP16, "config": {"tile": 8}})

    assert reply["refused"]
    assert "no configuration {'tile': 8}" in reply["error"]


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ({"do": "prepare", "slot": "base", "case": "nothing gemm cold m1n1k1"}, True),
        ({"do": "prepare", "slot": "base", "case": FP16.replace("cublas", "flexq-imma")}, True),
        ({"do": "memory", "case": "not a key"}, True),
        ({"do": "turn", "slot": "base"}, False),
        ({"do": "__init__"}, False),
    ],
)
def test_invalid_request_does_not_end_the_worker(answers, message, refused):
    first, second = answers(message, {"do": "describe"})

    assert first["refused"] is refused
    assert first["error"]
    assert second["reply"]["version"] == 1


def test_memory_is_estimated_without_allocation(operations):
    found = operations.memory(FP16)

    assert 0 < found["needed"] < found["free"]


@pytest.mark.slow
def test_two_kernels_are_compared_in_a_real_worker():
    rules = replace(InterleaveRules.with_processes(1), looks=1)
    cases = [Case.from_key("flexq-w6a6 gemm hot m4n256k256")]

    (found,) = compare_kernels("cublas-fp16", "flexq-w6a6", cases, device="cpu", rules=rules)

    assert found.confirmation.verdict is Verdict.SLOWER
    assert (found.case.label, found.head) == ("cublas-fp16", "flexq-w6a6")


@pytest.mark.slow
def test_two_commits_are_compared_on_a_real_device(two_commits):
    # Of two pairs of processes one disturbed pair would leave the verdict open.
    rules = replace(InterleaveRules.with_processes(4), looks=1)
    cases = [Case.from_key("flexq-w6a6 gemm hot m4n256k256"), Case.from_key(FP16)]

    found = {r.case.label: r for r in two_commits(cases, rules)}

    assert found["flexq-w6a6"].confirmation.verdict is Verdict.SLOWER
    assert found["flexq-w6a6"].confirmation.log_ratio > 0.4
    assert found["cublas-fp16"].confirmation.verdict is not Verdict.NO_DATA


def test_worker_does_nothing_before_its_first_request():
    """Device and source are unknown, so any use of them would be an error.

    Each comparison starts many, and importing SQLAlchemy takes a tenth of a start.
    """
    module = "flexq_bench.measure.ab.worker"
    options = ("--device", "none", "--kernels-from", "acme=/none/kernels.py")

    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )

    imported = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert all(line.startswith(b"import time:") for line in imported)
    assert not any(b" sqlalchemy" in line for line in imported)
