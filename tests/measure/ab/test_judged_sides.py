"""Untrusted workers: detection of wrong results and invented times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import RankThreads, ThreadRanks
from worker_inside import FAST, Answer, Inside

from flexq_bench.measure import Meter, judged_kernel
from flexq_bench.measure.ab.blocks import CasePair, measure_blocks
from flexq_bench.measure.ab.judged_sides import JudgingDevice, judged_pair
from flexq_bench.measure.ab.unchanged_files import UnchangedFiles
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.ranked_case import RankedCase, RankedCases
from flexq_bench.measure.shared_tensors import Exchange
from flexq_bench.measure.telemetry import NoSensor
from flexq_bench.measure.worker_process import WorkerError
from flexq_bench.workloads.case import Case

CASES = (
    "cublas-fp16 gemm hot m4n64k96",
    "flexq-w6a6 linear hot m3n40k200",
    "cublaslt-fp8 gemm hot m4n64k96",
    "atom-w4a4 linear hot m4n64k256",
    "dgq-w4a8 gemm hot m4n64k256",
    "w4a16 gemm hot m1n64k256",
)
NORM = "norm_quantize:tokens=3,hidden=256,norm=rms,residual=add"
OPERATIONS = (
    f"decoder-norm op hot {NORM}",
    f"decoder-norm op cold {NORM}",
    f"decoder-norm[int8] op hot {NORM}",
    "decoder-silu-mul op cold activation_quantize:tokens=3,hidden=256,function=silu_mul",
    "decoder-attention op cold decoder_attention:batch=2,context=9,heads=4,kv_heads=2,head_dim=32",
)
SUM = "all-reduce op cold all_reduce:elements=64,gpus=2"
OTHERS = (OPERATIONS[0], *OPERATIONS[3:])


class Recording:
    """A worker to which requests are only sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, _what: str, **arguments: Any) -> None:
        self.sent.append(arguments)


@pytest.fixture
def protocol() -> Protocol:
    return FAST


@pytest.fixture
def meter(protocol):
    made = Meter("cpu", protocol)
    with made.device_guard():
        yield made


@pytest.fixture
def judged(meter, protocol, tmp_path) -> Callable[..., CasePair]:
    """judged(case, turn=…): a pair of cases measured with a head that changes its replies."""

    numbers = count()

    def run(
        case: str = CASES[0],
        *,
        believes_binary: bool = True,
        processes: int = 1,
        together: int = 1,
        files: UnchangedFiles | None = None,
        **answers: Answer,
    ) -> CasePair:
        found = Case.from_key(case)
        folder = tmp_path / f"exchange {next(numbers)}"
        exchanged = {}
        for slot in ("base", "head", "reference"):
            (folder / slot).mkdir(parents=True)
            exchanged[slot] = Exchange(folder / slot)
        reference = Inside(meter), exchanged.pop("reference")
        judge = JudgingDevice(
            *(torch.device("cpu"), protocol, NoSensor(), exchanged, files), lambda _case: reference
        )
        match = judged_pair(found, found, judge, believes_binary=believes_binary)
        workers = [(Inside(meter), Inside(meter, **answers)) for _ in range(together)]
        for process in range(processes):
            measure_blocks(
                *(match, workers, process),
                placements=3,
                blocks=2,
                on_block=lambda _: None,
                side_by_side=together > 1,
                holds=together > 1,
            )
        return match

    return run


def scaled(by: float) -> Answer:
    def change(reply, _):
        return {**reply, "samples_us": [by * sample for sample in reply["samples_us"]]}

    return change


def of_the_file(change: Callable[[Path], object]) -> Answer:
    def write(reply, arguments):
        change(Path(arguments["path"]))
        return reply

    return write


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def one_column(path: Path) -> None:
    values = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float16).clone()
    values.view(4, 64)[:, 17] *= 1.01
    path.write_bytes(values.numpy().tobytes())


@pytest.fixture(params=["definition here", "definition of another worker"])
def defined(request, monkeypatch):
    """Where the functions of an operation's definition run."""
    is_elsewhere = request.param != "definition here"
    monkeypatch.setattr(judged_kernel, "is_defined_elsewhere", lambda _case: is_elsewhere)


def test_copies_of_a_judged_side_have_own_contents(judged):
    side = judged().base
    side.repeats = True  # as trusted sides may
    worker = Recording()

    side.begin_prepare(worker, None)

    assert worker.sent
    assert all(arguments.get("distinct", True) for arguments in worker.sent)


def test_head_that_declares_other_formats_is_refused(judged):
    def narrower(reply, _):
        return {**reply, "formats": {**reply["formats"], "weight": "int4/128"}}

    wrong = judged(prepare=narrower).head.wrong

    assert wrong.startswith("declares weight int4/128 instead of ")


@pytest.mark.parametrize(
    "case", [*OPERATIONS[1:3], *(pytest.param(c, marks=pytest.mark.slow) for c in OTHERS)]
)
@pytest.mark.usefixtures("defined")
def test_operation_is_right_and_its_spoiled_outputs_are_not(judged, case):
    assert judged(case).problem == ""
    assert "wrong in a timed turn" in judged(case, output=of_the_file(zeros)).head.wrong


@pytest.fixture
def _ranks_in_threads(monkeypatch):
    monkeypatch.setattr(
        RankedCases, "prepared", lambda _, case, *seeds: RankedCase(RankThreads(), case, *seeds)
    )


@pytest.mark.usefixtures("_ranks_in_threads")
def test_sum_over_ranks_is_right_and_spoiled_outputs_are_not(judged):
    assert judged(SUM).problem == ""
    assert "wrong in a timed turn" in judged(SUM, output=of_the_file(zeros)).head.wrong


@pytest.mark.parametrize("add", [lambda x: x, lambda x: x.mul_(2)], ids=["none", "own twice"])
@pytest.mark.usefixtures("_ranks_in_threads")
def test_sum_without_the_other_rank_is_detected_by_the_judge(judged, monkeypatch, add):
    monkeypatch.setattr(ThreadRanks, "add_by_library", lambda _, x: add(x))

    assert "elements wrong" in judged(SUM).head.wrong


@pytest.mark.usefixtures("_ranks_in_threads")
def test_clock_of_ranks_must_agree_with_that_of_the_judge(judged):
    assert "its clock is not the device's" in judged(SUM, turn=scaled(50)).head.wrong


@pytest.mark.usefixtures("defined")
def test_outputs_of_an_earlier_turn_are_detected_in_an_operation(judged):
    kept: list[bytes] = []

    def stale(path: Path) -> None:
        kept.append(path.read_bytes())
        path.write_bytes(kept[0])

    assert "wrong" in judged(OPERATIONS[1], output=of_the_file(stale)).head.wrong


@pytest.mark.parametrize("case", CASES)
def test_honest_kernel_has_no_error(judged, case):
    match = judged(case)

    assert match.problem == ""
    assert len(match.blocks) == 6
    assert all(block.head_us > 0 for block in match.blocks)


def test_pairs_on_the_device_together_stop_while_another_is_timed(judged, monkeypatch):
    stopped = []

    def paused(*workers):
        stopped.extend([workers[0], *workers[1]])
        return nullcontext()

    monkeypatch.setattr(Inside, "paused", paused)

    match = judged(together=2)

    assert (match.problem, match.processes) == ("", 2)
    assert [block.process for block in match.blocks] == [0, 0, 1, 1] * 3
    assert len(set(stopped)) == 4
    assert len(stopped) == 3 * 4 * len(match.blocks)


@pytest.mark.parametrize("change", [zeros, one_column], ids=["zeros", "one column"])
def test_wrong_outputs_of_timed_turns_are_detected(judged, change):
    assert "wrong in a timed turn" in judged(output=of_the_file(change)).head.wrong


def test_stale_outputs_are_detected(judged):
    kept: list[bytes] = []

    def stale(path: Path) -> None:
        kept.append(path.read_bytes())
        path.write_bytes(kept[0])

    assert "wrong in a timed turn" in judged(output=of_the_file(stale)).head.wrong


def test_integer_kernels_must_be_exact_on_timed_buffers(judged):
    asked = iter(range(1000))

    def nearly(path: Path) -> None:
        if next(asked) % 7 != 5:  # four turns, then realistic, full-range and small inputs
            return
        values = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int16).clone()
        values[0] += 1  # the next FP16 number
        path.write_bytes(values.numpy().tobytes())

    match = judged("flexq-w6a6 gemm hot m3n40k256", output=of_the_file(nearly))

    assert "not bit-exact: 1 of 120 elements wrong" in match.head.wrong
    assert match.base.wrong == ""


# This machine may be busy: what is missing must be more than what other programs take.
in_long_turns = pytest.mark.parametrize(
    "protocol", [replace(FAST, turn_s=0.015)], ids=["long turns"]
)


@in_long_turns
def test_times_much_shorter_than_their_turns_are_refused(judged):
    wrong = judged(turn=scaled(0.3), processes=2).head.wrong

    assert "unaccounted for" in wrong
    assert "its clock is not the device's" in wrong


@in_long_turns
def test_missing_samples_are_refused(judged):
    def few(reply, _):
        few = max(1, len(reply["samples_us"]) // 4)
        return {**reply, **{of: reply[of][:few] for of in ("samples_us", "sm_mhz")}}

    assert "samples" in judged(turn=few).head.wrong


def test_turns_of_both_sides_have_as_many_samples(judged):
    match = judged(processes=2)

    base, head = ([turn.samples for turn in side.turns] for side in (match.base, match.head))
    assert set(head) <= set(base)
    assert head[:2] == base[:1] * 2  # the first block: base, head, head, base


def test_later_processes_of_both_sides_have_as_many_launches(judged):
    asked = []

    def place(reply, arguments):
        asked.append(arguments)
        return reply

    match = judged(processes=2, place=place)

    assert [request["index"] for request in asked] == list(range(6))
    assert {request["launches"] for request in asked[3:]} == {match.base.launches}


def test_times_longer_than_their_turn_are_refused(judged):
    assert "in a turn of" in judged(turn=scaled(3.0)).head.wrong


def test_long_sample_within_its_turn_is_accepted(judged):
    def alone(reply, _):
        all_us = sum(reply["samples_us"])  # the untimed sample took less than the disturbed one
        return {**reply, "samples_us": [all_us], "sm_mhz": [None]}

    assert "in a turn of" not in judged(turn=alone).head.wrong


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"samples_us": [], "launches": 1, "sm_mhz": []},
        {"samples_us": [1.0], "launches": 0, "sm_mhz": [None]},
        {"samples_us": ["x"], "launches": 1, "sm_mhz": [None]},
        {"samples_us": [float("nan")], "launches": 1, "sm_mhz": [None]},
        {"samples_us": [-1.0], "launches": 1, "sm_mhz": [None]},
        {"samples_us": [1.0], "launches": 1, "sm_mhz": []},
    ],
)
def test_turn_without_times_is_a_worker_error(judged, reply):
    with pytest.raises(WorkerError, match="reported no times"):
        judged(turn=lambda _reply, _arguments: reply)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"short"),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(b""),
        lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero")),
    ],
    ids=["short", "long", "none", "link"],
)
def test_output_of_another_size_is_a_worker_error(judged, change):
    with pytest.raises(WorkerError, match="gave no output"):
        judged(output=of_the_file(change))


def test_clocks_reported_by_the_worker_are_ignored(judged):
    turns = judged(turn=lambda reply, _: {**reply, "mhz": 1.0, "valid": False}).blocks[0].head

    assert [(turn.mhz, turn.valid) for turn in turns] == [(None, True)] * 2


def test_hash_of_machine_code_from_head_is_ignored(judged):
    told = {"prepare": lambda reply, _: {**reply, "binary": "1f"}}

    assert judged(**told).head.binary == "1f"
    assert judged(**told, believes_binary=False).head.binary is None


def test_changed_file_is_detected(judged, tmp_path):
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "kernel.py"
    file.write_text("fast")
    files = UnchangedFiles([tmp_path / "tree"])

    def change_and_restore(reply, _):
        file.write_text("slow")
        file.write_text("fast")
        return reply

    assert f"{file} changed" in judged(files=files, leave=change_and_restore).head.wrong
    assert judged(files=UnchangedFiles([tmp_path / "tree"])).head.wrong == ""
