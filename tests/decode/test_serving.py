"""Continuous batching: who is served when, and that nobody's answer depends on the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import an_engine, prompts, small_llama

from flexq_bench.decode.requests import Request, drawn_requests, read_requests
from flexq_bench.decode.schedule import Schedule
from flexq_bench.decode.serving import serve, slots_within
from flexq_bench.errors import MeasureError, UsageError
from kernels.decoder.torch_operations import TorchOperations

CPU = torch.device("cpu")
GIB = 1 << 30


def test_first_come_first_served_and_a_finished_one_is_replaced_at_once() -> None:
    schedule = Schedule([Request(5, 2), Request(3, 4), Request(4, 1), Request(6, 2)], slots=2)

    assert [(a.slot, a.index) for a in schedule.admit()] == [(0, 0), (1, 1)]
    assert schedule.finish() == []
    assert schedule.longest == 7
    schedule.step()
    assert schedule.finish() == [(0, 0)]
    assert [(a.slot, a.index) for a in schedule.admit()] == [(0, 2)]
    assert schedule.finish() == [(0, 2)]  # one token, which its prompt gave
    assert [(a.slot, a.index) for a in schedule.admit()] == [(0, 3)]
    schedule.step()
    assert schedule.finish() == [(0, 3)]
    schedule.step()
    assert schedule.finish() == [(1, 1)]
    assert schedule.is_done


def test_each_request_gets_the_answer_that_it_gets_alone() -> None:
    engine = an_engine(small_llama(CPU), "fp16", TorchOperations(), slots=3)
    lengths = [(9, 12), (20, 3), (5, 1), (14, 20), (7, 9), (3, 5)]
    requests = [Request(*pair) for pair in lengths]
    ids = prompts(len(requests), 20, CPU)

    served = serve(engine, requests, ids)

    for i, (prompt, new) in enumerate(lengths):
        alone = engine.generate(ids[i : i + 1, :prompt], new).tokens[0]
        assert torch.equal(served.answers[i], alone)
    assert len(served.latency_s) == len(requests)
    assert served.seconds >= max(served.latency_s)


def test_memory_decides_how_many_are_served_at_a_time() -> None:
    assert slots_within(24 * GIB, 12 * GIB, GIB, GIB // 2, 256) == 22
    assert slots_within(24 * GIB, 12 * GIB, GIB, GIB // 2, 8) == 8


def test_memory_that_holds_no_sequence_is_refused_with_what_one_needs() -> None:
    with pytest.raises(MeasureError, match=r"one sequence needs 27\.0 GiB \(25\.0 of weights\)"):
        slots_within(24 * GIB, 25 * GIB, GIB, GIB, 8)


def test_drawn_lengths_have_the_means_they_claim_and_fit() -> None:
    requests = drawn_requests(20000, 1 << 20, seed=1)

    mean = sum(request.prompt_tokens for request in requests) / len(requests)
    assert mean == pytest.approx(161.3, rel=0.05)
    assert max(r.length for r in drawn_requests(1000, 100, seed=1)) <= 100


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("12,30\n7,1\n")

    assert read_requests(path) == [Request(12, 30), Request(7, 1)]


@pytest.mark.parametrize("text", ["12", "12,x", "0,5", "1,2,3"])
def test_a_wrong_line_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"1,1\n{text}\n")

    with pytest.raises(UsageError, match=r"lengths\.csv:2: need two lengths"):
        read_requests(path)
