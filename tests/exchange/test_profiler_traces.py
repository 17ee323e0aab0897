"""Traces of torch.profiler: calls by workload, nested operators, kernels' times, damaged files."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flexq_bench.errors import UsageError
from flexq_bench.exchange.profiler_traces import read_profiler_trace
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import operation

STEPS = 3


def a_decoder_step(tokens):
    """Calls of the operators that serving engines use, by the functions that users call."""
    functional = torch.nn.functional
    x, w = torch.randn(2, tokens, 64), torch.randn(96, 64)
    functional.linear(functional.rms_norm(x, (64,), torch.ones(64)), w, torch.randn(96))
    x @ w.T  # aten::matmul, with aten::mm within
    torch.mm(x[0], w.T)
    codes = torch.ones(32, 16, dtype=torch.int8)
    torch._int_mm(codes, torch.ones(16, 8, dtype=torch.int8))
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16)
    functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    prompt = torch.randn(1, 4, 6, 16)
    functional.scaled_dot_product_attention(prompt, prompt, prompt, is_causal=True)
    functional.scaled_dot_product_attention(prompt, prompt, prompt)  # not causal
    torch.bmm(torch.randn(3, 4, 5), torch.randn(3, 5, 6))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for step in range(STEPS):
            with torch.profiler.record_function(f"ProfilerStep#{step}"):
                a_decoder_step(tokens=5)
        with torch.profiler.record_function("other"):
            torch.mm(torch.ones(7, 64), torch.ones(64, 96))
    profiler.export_chrome_trace(str(path))
    return path


def counts_of(trace):
    return {launch.workload: launch.count for launch in trace.launches}


def test_profiled_operators_are_counted_once_each(profiled):
    trace = read_profiler_trace(str(profiled))

    heads = {"heads": 4, "head_dim": 16, "layout": "contiguous"}
    assert counts_of(trace) == {
        GemmWorkload(10, 96, 64): 2 * STEPS,  # linear and matmul of [2, 5, 64]
        GemmWorkload(5, 96, 64): STEPS,
        GemmWorkload(32, 8, 16): STEPS,
        GemmWorkload(7, 96, 64): 1,
        operation("grouped_linear").workload(tokens=4, experts=3, top_k=3, n=6, k=5): STEPS,
        operation("norm_quantize").workload(tokens=10, hidden=64): STEPS,
        operation("attention_decode").workload(batch=2, context=9, kv_heads=2, **heads): STEPS,
        operation("attention_prefill").workload(tokens=6, kv_heads=4, **heads): STEPS,
    }
    assert trace.steps == STEPS
    assert {(part.source, part.count) for part in trace.unmeasured} == {
        ("aten::scaled_dot_product_attention", STEPS),
    }
    assert trace.traced_us > 0


def test_compressed_trace_reads_the_same(profiled, tmp_path):
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(profiled.read_bytes()))

    assert read_profiler_trace(str(packed)) == read_profiler_trace(str(profiled))


def an_event(name, ts, dur, category="cpu_op", tid=1, **arguments):
    event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
    return {**event, "args": arguments}


def a_call(name, ts, dur, *dims, tid=1, values=()):
    shapes = {"Input Dims": [list(shape) for shape in dims], "Concrete Inputs": list(values)}
    return an_event(name, ts, dur, tid=tid, **shapes)


def a_launch(ts, correlation, name="cudaLaunchKernel", tid=1):
    return an_event(name, ts, 1, "cuda_runtime", tid, correlation=correlation)


def a_kernel(name, dur, correlation):
    return an_event(name, 10**6, dur, "kernel", 7, correlation=correlation)


def write(path, events, **others):
    path.write_text(json.dumps({"schemaVersion": 1, **others, "traceEvents": events}))
    return str(path)


def test_kernels_count_with_the_call_that_launched_them(tmp_path):
    events = [
        a_kernel("split_k", 5.0, 12),
        a_kernel("gemm", 20.0, 11),
        a_call("aten::linear", 0, 100, (8, 64), (32, 64)),
        a_call("aten::addmm", 10, 80, (32,), (8, 64), (64, 32)),
        a_launch(20, 11),
        a_launch(30, 12),
        a_call("aten::linear", 0, 100, (8, 64), (16, 64), tid=2),
        a_launch(40, 13, tid=2),
        a_kernel("gemm", 7.0, 13),
        a_launch(150, 14),
        a_kernel("silu", 3.0, 14),
        a_launch(160, 15, "cudaGraphLaunch"),
        a_kernel("gemm", 50.0, 15),
        a_kernel("gemm", 50.0, 15),
    ]

    trace = read_profiler_trace(write(tmp_path / "gpu.json", events, deviceProperties=[{"id": 0}]))

    assert {(one.workload, one.traced_us) for one in trace.launches} == {
        (GemmWorkload(8, 32, 64), 25.0),
        (GemmWorkload(8, 16, 64), 7.0),
    }
    rest = {(part.source, part.count, part.traced_us) for part in trace.unmeasured}
    assert rest == {("gemm", 2, 100.0), ("silu", 1, 3.0)}
    assert "CUDA graph" in trace.unmeasured[0].reason


@pytest.mark.parametrize(
    ("call", "workload"),
    [
        (a_call("_C::cutlass_scaled_mm", 0, 1, (4, 48), (4, 64), (64, 48)), (4, 48, 64)),
        (a_call("aten::_scaled_mm", 0, 1, (4, 64), (64, 48), (), ()), (4, 48, 64)),
        (a_call("sgl_kernel::int8_scaled_mm", 0, 1, (4, 64), (64, 48)), (4, 48, 64)),
        (a_call("aten::bmm", 0, 1, (1, 4, 64), (1, 64, 48)), (4, 48, 64)),
    ],
)
def test_operators_of_engines_are_read(call, workload, tmp_path):
    trace = read_profiler_trace(write(tmp_path / "one.json", [call]))

    assert counts_of(trace) == {GemmWorkload(*workload): 1}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (an_event("aten::mm", 0, 1), "record_shapes"),
        (a_call("aten::mm", 0, 1, (4, 64), (63, 48)), "fit"),
        (a_call("aten::mm", 0, 1, (4, 64)), "shapes"),
        (a_call("aten::mm", 0, 1, (1 << 40, 64), (64, 48)), "M must be"),
        (an_event("aten::mm", 0, 1, **{"Input Dims": {"a": 1}}), "shapes"),
        (an_event("aten::mm", 0, 1, **{"Input Dims": [[True, 2], ["x", 3]]}), "shape"),
        (a_call("aten::rms_norm", 0, 1, (4, 1 << 40)), "hidden"),
    ],
)
def test_call_without_a_workload_is_listed_with_its_reason(call, reason, tmp_path):
    trace = read_profiler_trace(write(tmp_path / "one.json", [call]))

    assert not trace.launches
    assert reason in trace.unmeasured[0].reason


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"no json",
        b'{"traceEvents": [{"ph": "X"}',
        b'{"traceEvents": [' + b"[" * 100_000,
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": NaN, "dur": 1}]}',
        b'{"traceEvents": 3}',
        b"\xff\xfe\x00 binary",
        gzip.compress(b'{"traceEvents": [' + b" " * 1000, mtime=0)[:-9],
        b'{"a": "' + b"x" * (5 << 20) + b'", "traceEvents": []}',
    ],
)
def test_file_that_is_no_trace_is_refused(content, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=r"bad\.json"):
        read_profiler_trace(str(path))


def test_events_across_chunks_are_read(tmp_path):
    calls = [a_call("aten::mm", 10 * i, 1, (4, 64), (64, 48)) for i in range(20_000)]

    trace = read_profiler_trace(write(tmp_path / "long.json", calls))

    assert (tmp_path / "long.json").stat().st_size > 2 << 20  # several chunks
    assert counts_of(trace) == {GemmWorkload(4, 48, 64): 20_000}
