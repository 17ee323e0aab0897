"""Continuous batching: who is served when, and that nobody's answer depends on the others."""

from __future__ import annotations

import pytest
import torch
from decoders import an_engine, prompts, small_llama

from flexq_bench.decode.case import CachedScheme, Setup
from flexq_bench.decode.continuous_batching import Scheduler, step_sizes
from flexq_bench.decode.requests import ServingRequest, drawn_requests, read_requests
from flexq_bench.decode.runs import Serving, serving_cases
from flexq_bench.decode.serving import serve, slots_within
from flexq_bench.errors import MeasureError, UsageError
from flexq_bench.kernels.decoder.torch_operations import TorchOperations

CPU = torch.device("cpu")
GIB = 1 << 30


def test_finished_request_is_replaced_at_once_in_order():
    scheduler = Scheduler(
        [ServingRequest(5, 2), ServingRequest(3, 4), ServingRequest(4, 1), ServingRequest(6, 2)],
        2,
        64,
    )

    assert [(a.slot, a.index) for a in scheduler.admit()] == [(0, 0), (1, 1)]
    assert read_all(scheduler) == [0, 1]
    assert scheduler.finish() == []
    assert scheduler.longest == 7
    scheduler.step()
    assert scheduler.finish() == [(0, 0)]
    assert [(a.slot, a.index) for a in scheduler.admit()] == [(0, 2)]
    assert read_all(scheduler) == [2]
    assert scheduler.finish() == [(0, 2)]  # one token, which its prompt gave
    assert [(a.slot, a.index) for a in scheduler.admit()] == [(0, 3)]
    assert read_all(scheduler) == [3]
    scheduler.step()
    assert scheduler.finish() == [(0, 3)]
    scheduler.step()
    assert scheduler.finish() == [(1, 1)]
    assert scheduler.is_done


def read_all(scheduler):
    started = []
    while (prefill := scheduler.next_prefill()) is not None:
        started += scheduler.read(prefill)
    return started


def test_prompts_are_prefilled_in_order_within_step_tokens():
    scheduler = Scheduler(
        [ServingRequest(100, 2), ServingRequest(300, 2), ServingRequest(60, 2)], 3, 512
    )
    scheduler.admit()

    first = scheduler.next_prefill()
    assert (first.rows, first.tokens) == (2, 256)
    assert [(p.index, p.start, p.count) for p in first.chunks] == [(0, 0, 100), (1, 0, 256)]
    assert scheduler.read(first) == [0]  # the second has 44 tokens left
    second = scheduler.next_prefill()
    assert (second.rows, second.tokens, second.longest) == (2, 64, 300)
    assert [(p.index, p.start, p.count) for p in second.chunks] == [(1, 256, 44), (2, 0, 60)]
    assert scheduler.read(second) == [1, 2]
    assert scheduler.next_prefill() is None


def test_step_computes_slots_up_to_the_last_decoding():
    scheduler = Scheduler(
        [ServingRequest(2, 9), ServingRequest(2, 2), ServingRequest(2, 9)], 3, 192
    )
    scheduler.admit()
    read_all(scheduler)
    assert scheduler.decoding == 3
    scheduler.step()
    scheduler.finish()
    assert scheduler.decoding == 3  # the one in the middle is done

    assert step_sizes(71) == [71, 32, 8]
    assert step_sizes(3) == [3]


def test_prefills_and_steps_alternate():
    requests = [ServingRequest(100, 2), ServingRequest(30, 3)]

    iterations = list(Scheduler(requests, 1, 64).iterations())

    assert [
        (i.prefill is not None, [a.index for a in i.admitted], i.started, i.finished)
        for i in iterations
    ] == [
        (True, [0], (), ()),
        (True, [], (0,), ()),
        (False, [], (), ((0, 0),)),
        (True, [1], (1,), ()),
        (False, [], (), ()),
        (False, [], (), ((0, 1),)),
    ]
    steps = [(i.decoding, i.longest) for i in iterations if i.prefill is None]
    assert steps == [(1, 102), (1, 32), (1, 33)]


@pytest.mark.parametrize(("step_tokens", "kv_bits"), [(64, 16), (8, 16), (3, 4)])
def test_each_request_has_its_answer_alone(step_tokens, kv_bits):
    small = small_llama(CPU)
    engine = an_engine(small, "fp16", TorchOperations(), slots=3, kv_bits=kv_bits)
    lengths = [(9, 12), (20, 3), (5, 1), (14, 20), (7, 9), (3, 5)]
    requests = [ServingRequest(*pair) for pair in lengths]
    ids = prompts(len(requests), 20, CPU)

    served = serve(engine, requests, ids, step_tokens)

    for i, (prompt, new) in enumerate(lengths):
        alone = engine.generate(ids[i : i + 1, :prompt], new).tokens[0]
        assert torch.equal(served.answers[i], alone)
    waits = zip(served.ttft_ms, served.latency_ms, strict=True)
    assert all(0 < ttft <= latency for ttft, latency in waits)
    assert 1000 * served.seconds >= max(served.latency_ms)


def test_memory_limits_the_slots():
    assert slots_within(24 * GIB, 12 * GIB, GIB, GIB // 2, 256) == 22
    assert slots_within(24 * GIB, 12 * GIB, GIB, GIB // 2, 8) == 8


def test_memory_below_one_sequence_is_refused():
    with pytest.raises(MeasureError, match=r"one sequence needs 27\.0 GiB \(25\.0 of weights\)"):
        slots_within(24 * GIB, 25 * GIB, GIB, GIB, 8)


def test_drawn_lengths_have_their_means_and_fit():
    requests = drawn_requests(20000, 1 << 20, seed=1)

    mean = sum(request.prompt_tokens for request in requests) / len(requests)
    assert mean == pytest.approx(161.3, rel=0.05)
    assert max(r.length for r in drawn_requests(1000, 100, seed=1)) <= 100


def test_lengths_come_from_a_file(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("12,30\n7,1\n")

    assert read_requests(path) == [ServingRequest(12, 30), ServingRequest(7, 1)]


@pytest.mark.parametrize("text", ["12", "12,x", "0,5", "1,2,3"])
def test_a_wrong_line_is_named(tmp_path, text):
    path = tmp_path / "lengths.csv"
    path.write_text(f"1,1\n{text}\n")

    with pytest.raises(UsageError, match=r"lengths\.csv:2: need two lengths"):
        read_requests(path)


def test_requests_are_added_and_removed_between_iterations():
    scheduler = Scheduler([ServingRequest(4, 9)], 2, 64)
    iterations = scheduler.iterations()
    assert next(iterations).started == (0,)
    scheduler.add(7, ServingRequest(3, 2))
    scheduler.add(8, ServingRequest(3, 2))
    assert next(iterations).decoding == 1

    assert scheduler.remove(8) is None  # waits
    prefill = next(iterations)
    assert [(a.slot, a.index) for a in prefill.admitted] == [(1, 7)]
    assert scheduler.remove(0) == 0
    assert scheduler.remove(0) is None
    assert next(iterations).finished == ((1, 7),)
    assert next(iterations, None) is None


def test_each_batch_limit_serves_the_first_of_equal_requests():
    setup = Setup("llama-7b", (CachedScheme("fp16"),), "cpu")

    small, large = serving_cases(
        setup, Serving((2, 8), None, 3, 64, None, step_tokens=64, times_limit=True)
    )

    assert (len(small.requests), len(large.requests)) == (6, 24)
    assert small.requests == large.requests[:6]
