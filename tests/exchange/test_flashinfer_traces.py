"""Reading and writing of FlashInfer-Bench trace sets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexq_bench.errors import UsageError
from flexq_bench.exchange import flashinfer_traces
from flexq_bench.exchange.flashinfer_definitions import definition_of
from flexq_bench.exchange.flashinfer_operations import definition_json, variable_axes
from flexq_bench.exchange.flashinfer_traces import (
    read_launches,
    read_traces,
    suite_text,
    write_traces,
)
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.reference import reference_gemm
from flexq_bench.kernels.registry import resolve
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import declared_as_plain, operation, operation_names
from flexq_bench.workloads.suites import read_suite

VERSIONS = {name: resolve(name, "cuda").spec.version for name in ("flexq-w6a6", "w4a16")}

GEMM = {
    "name": "gemm_n4096_k2048",
    "op_type": "gemm",
    "axes": {
        "M": {"type": "var"},
        "N": {"type": "const", "value": 4096},
        "K": {"type": "const", "value": 2048},
    },
    "inputs": {
        "A": {"shape": ["M", "K"], "dtype": "float16"},
        "B": {"shape": ["N", "K"], "dtype": "float16"},
    },
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
    "reference": "def run(A, B):\n    return A @ B.T\n",
}


def a_workload(m):
    inputs = {"A": {"type": "random"}, "B": {"type": "random"}}
    return {"axes": {"M": m}, "inputs": inputs, "uuid": f"workload {m}"}


def a_trace(m, ms=None, status="PASSED", definition="gemm_n4096_k2048"):
    evaluation = {
        "status": status,
        "environment": {"hardware": "NVIDIA_H100", "libs": {}},
        "timestamp": "2026-01-31T02:00:00",
    }
    if ms is not None:
        times = {"latency_ms": ms, "reference_latency_ms": 1.0, "speedup_factor": 1.0}
        evaluation["performance"] = times
    return {
        "definition": definition,
        "workload": a_workload(m),
        "solution": "their_gemm",
        "evaluation": evaluation,
    }


@pytest.fixture
def trace_set(tmp_path):
    def write(traces=(), workloads=(1, 8), definitions=(GEMM,)):
        root = tmp_path / "set"
        for kind in ("definitions", "workloads", "traces"):
            (root / kind / "gemm").mkdir(parents=True)
        for one in definitions:
            path = root / "definitions" / "gemm" / f"{one['name']}.json"
            path.write_text(json.dumps(one))
        lines = [{"definition": GEMM["name"], "workload": a_workload(m)} for m in workloads]
        for kind, rows in (("workloads", lines), ("traces", traces)):
            text = "\n".join(map(json.dumps, rows))
            (root / kind / "gemm" / "gemm_n4096_k2048.jsonl").write_text(text)
        return str(root)

    return write


def test_traces_become_results_with_samples(trace_set):
    folder = trace_set([a_trace(8, 0.5), a_trace(8, 0.7), a_trace(1, status="TIMEOUT")])

    reading = read_traces(folder)

    timed, failed = reading.results
    assert (timed.name, timed.variant) == ("their_gemm", "gemm_n4096_k2048")
    assert (timed.shape, timed.device) == ((8, 4096, 2048), "NVIDIA_H100")
    assert (timed.median, timed.samples) == (600.0, (500.0, 700.0))
    assert (failed.median, failed.detail) == (None, "TIMEOUT")
    assert reading.created_at == "2026-01-31T02:00:00+00:00"


def test_bad_traces_are_refused(trace_set):
    traces = [
        a_trace(1, 0.5, definition="gone"),
        {"definition": GEMM["name"], "workload": {}},
        a_trace(4, -0.5),
    ]

    reading = read_traces(trace_set(traces))

    assert reading.results == ()
    assert [one.reason for one in reading.refused] == [
        "its definition is not among the definitions",
        "it is no trace of a solution",
        "-500 µs is not a plausible time",
    ]


def test_shapes_of_gemms_become_a_suite(trace_set, tmp_path):
    folder = trace_set(workloads=(8, 1, 8))
    path = tmp_path / "theirs.toml"
    path.write_text(suite_text(folder, ("cublas-fp16",)))

    shapes = [case.gemm for case in read_suite(path).cases(["cublas-fp16"])]
    assert {(one.m, one.n, one.k) for one in shapes} == {(1, 4096, 2048), (8, 4096, 2048)}


ATTENTION = {
    "name": "gqa_paged_decode_h16_kv2_d128_ps64",
    "op_type": "gqa_paged",
    "axes": {
        "batch_size": {"type": "var"},
        "num_qo_heads": {"type": "const", "value": 16},
        "num_kv_heads": {"type": "const", "value": 2},
        "head_dim": {"type": "const", "value": 128},
        "page_size": {"type": "const", "value": 64},
        "num_pages": {"type": "var"},
        "len_indptr": {"type": "var"},
        "num_kv_indices": {"type": "var"},
    },
    "inputs": {
        "q": {"shape": ["batch_size", "num_qo_heads", "head_dim"], "dtype": "bfloat16"},
        "sm_scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "output": {"shape": ["batch_size", "num_qo_heads", "head_dim"], "dtype": "bfloat16"}
    },
    "reference": "def run(q, sm_scale):\n    return q\n",
}
NORM = {
    "name": "fused_add_rmsnorm_h4096",
    "op_type": "rmsnorm",
    "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 4096}},
    "inputs": {"hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}},
    "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}},
    "reference": "def run(hidden_states):\n    return hidden_states\n",
}
SAMPLING = {**NORM, "name": "top_k_v8", "op_type": "sampling"}
PREFILL = {
    **ATTENTION,
    "name": "gqa_ragged_prefill_causal_h16_kv2_d128",
    "op_type": "gqa_ragged",
    "axes": {
        **{name: ATTENTION["axes"][name] for name in ("num_qo_heads", "num_kv_heads", "head_dim")},
        **{name: {"type": "var"} for name in ("total_q", "total_kv", "len_indptr")},
    },
}
HEADS = "heads=16 kv_heads=2 head_dim=128"
AXES = {
    ATTENTION["name"]: {"batch_size": 2, "num_pages": 99, "len_indptr": 3, "num_kv_indices": 32},
    NORM["name"]: {"batch_size": 8},
    SAMPLING["name"]: {"batch_size": 8},
    PREFILL["name"]: {"total_q": 200, "total_kv": 300, "len_indptr": 3},
}


def a_trace_of(definition):
    trace = a_trace(1, 0.5, definition=definition["name"])
    return trace | {"workload": trace["workload"] | {"axes": AXES[definition["name"]]}}


@pytest.mark.parametrize(
    ("definition", "operation", "parameters"),
    [
        (ATTENTION, "attention_decode", f"batch=2 context=1024 {HEADS} layout=paged block=64"),
        (
            PREFILL,
            "attention_prefill",
            f"tokens=100 batch=2 past=50 {HEADS} layout=contiguous block=16",
        ),
        (NORM, "norm_quantize", "tokens=8 hidden=4096 norm=rms residual=add"),
        (SAMPLING, "sampling", "batch_size=8 hidden_size=4096"),
    ],
)
def test_traces_of_any_operation_have_its_parameters(trace_set, definition, operation, parameters):
    (result,) = read_traces(trace_set([a_trace_of(definition)], definitions=(definition,))).results

    assert (result.operation, result.parameters) == (operation, parameters)
    assert result.median == 500.0


def test_workloads_of_known_operations_become_cases(trace_set, tmp_path):
    folder = trace_set(definitions=(GEMM, ATTENTION, SAMPLING))
    lines = (tmp_path / "set" / "workloads" / "gemm" / "gemm_n4096_k2048.jsonl").open("a")
    with lines:
        for one in (ATTENTION, SAMPLING):
            trace = a_trace_of(one)
            lines.write(
                "\n" + json.dumps({name: trace[name] for name in ("definition", "workload")})
            )
    path = tmp_path / "theirs.toml"
    path.write_text(suite_text(folder, ("cublas-fp16",)))

    cases = read_suite(path).cases(["cublas-fp16"])
    assert [case.operation for case in cases] == ["linear", "linear", "attention_decode"]


@pytest.mark.parametrize("content", ["{", "[]", '{"name": 1}'])
def test_folder_without_trace_set_is_refused(tmp_path, content):
    with pytest.raises(UsageError, match="has no folder definitions"):
        read_traces(str(tmp_path))
    (tmp_path / "definitions").mkdir()
    (tmp_path / "definitions" / "a.json").write_text(content)

    with pytest.raises(UsageError, match="is no definition"):
        read_traces(str(tmp_path))


@pytest.fixture
def ours(build, tmp_path):
    """Where our results went as a trace set, and how many of them."""
    a16 = {"kernel": "w4a16", "weight_bits": 4, "act_bits": 16, "group": 128}
    records = [
        build.a_record(),
        build.a_record("m8", m=8),
        build.a_record("weight-only", max_rel_error=1e-4, exact=None, **a16),
        build.a_record("linear", stage="linear"),
        build.a_record("theirs", project="their/kernels"),
        build.a_record("gone", kernel="a-kernel-of-long-ago"),
        build.a_record(
            "norm",
            kernel="decoder-norm",
            stage="op",
            operation="norm_quantize",
            m=None,
            n=None,
            k=None,
            parameters="tokens=4 hidden=256 norm=rms residual=none",
        ),
    ]
    folder = tmp_path / "ours"
    current = [replace(one, kernel_version=VERSIONS.get(one.kernel, 1)) for one in records]
    return folder, write_traces(folder, current)


def test_written_traces_are_read_unchanged(ours):
    folder, count = ours
    read = read_traces(str(folder)).results
    (norm,) = [one for one in read if one.name == "decoder-norm"]
    results = {(one.name, one.shape): one for one in read if one is not norm}

    assert count == 4
    assert (norm.operation, norm.median) == ("norm_quantize", pytest.approx(6.1))
    assert norm.parameters == "tokens=4 hidden=256 norm=rms residual=none"
    assert set(results) == {
        ("flexq-w6a6", (1, 4096, 4096)),
        ("flexq-w6a6", (8, 4096, 4096)),
        ("w4a16", (1, 4096, 4096)),
    }
    assert results["flexq-w6a6", (8, 4096, 4096)].median == pytest.approx(6.1)


def test_reference_of_a_definition_equals_ours(ours):
    folder, _ = ours
    (path,) = folder.glob("definitions/gemm/*int6g128_int6g128*.json")
    definition = json.loads(path.read_text())
    generator = torch.Generator().manual_seed(0)

    def an_operand(rows):
        codes = torch.randint(-31, 32, (rows, 4096), generator=generator).to(torch.int8)
        return codes, torch.rand((rows, 32), generator=generator).half() / 64

    (a, a_scales), (b, b_scales) = an_operand(2), an_operand(3)
    space: dict = {}
    exec(definition["reference"], space)
    given = {"A": a, "A_scales": a_scales, "B": b, "B_scales": b_scales}
    result = space["run"](*(given[name] for name in definition["inputs"]))

    expected = reference_gemm(
        Operand(a, a_scales, bits=6, group=128), Operand(b, b_scales, bits=6, group=128)
    ).y.half()
    assert torch.isfinite(result).all()
    assert torch.equal(result, expected)


def test_flashinfer_bench_reads_our_traces(ours):
    data = pytest.importorskip("flashinfer_bench.data")
    folder, count = ours

    traces = data.TraceSet.from_path(str(folder))

    assert sum(map(len, traces.traces.values())) == count
    assert set(traces.traces) == set(traces.workloads) == set(traces.definitions)
    assert all(one.is_successful() for rows in traces.traces.values() for one in rows)


def test_workloads_of_a_trace_set_are_counted(trace_set):
    root = trace_set(workloads=(1, 8, 8, 0))

    trace = read_launches(root)

    counts = {launch.workload: launch.count for launch in trace.launches}
    assert counts == {GemmWorkload(8, 4096, 2048): 2, GemmWorkload(1, 4096, 2048): 1}
    assert [(part.source, part.count) for part in trace.unmeasured] == [("gemm_n4096_k2048", 1)]
    file = next(Path(root, "workloads").rglob("*.jsonl"))
    assert read_launches(str(file)) == trace


SHIPPED = {
    "grouped_linear": "tokens=5 experts=8 top_k=2 n=32 k=64 skew=0 layout=masked",
    "attention_decode": f"batch=2 context=40 {HEADS} layout=paged block=16",
    "attention_prefill": f"tokens=9 batch=1 past=0 {HEADS} layout=contiguous block=16",
    "decoder_attention": f"batch=2 context=40 {HEADS}",
    "norm_quantize": "tokens=4 hidden=256 norm=layer residual=add",
    "activation_quantize": "tokens=4 hidden=256 function=silu_mul",
    "rope_cache_write": f"tokens=4 {HEADS} slots=16",
    "linear_epilogue": "m=3 n=32 k=64 bias=add function=gelu residual=none",
    "all_reduce": "elements=512 gpus=2",
}
NUMBERS = {
    "integers": ("int8/row", "int8/row@fp32", "int4/row", "fp16"),
    "floats": ("fp8/row", "fp8/row@fp32", "fp8-e5m2/row", "bf16"),
    "reals": ("bf16", "bf16", "bf16", "bf16"),
}


def a_spec(of, kind="integers"):
    """A kernel of this operation with such numbers."""
    *texts, output = NUMBERS[kind]
    weight, activation, cache = map(NumberFormat.parse, texts)
    spec = resolve("w8a16", "cpu").spec
    numbers = {"weight": weight, "activation": activation, "cache": cache}
    return replace(spec, operation=of, output=output, **numbers)


def choices(of, text):
    """The workload, and those with another choice of one of its parameters."""
    values = operation(of).parse(text)
    for parameter in operation(of).parameters:
        for choice in parameter.choices or (values[parameter.name],):
            yield operation(of).workload(**{**values, parameter.name: choice})


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("floats", ["float8_e4m3fn", "float32", "float8_e4m3fn", "float16", "bfloat16"]),
        ("reals", ["bfloat16"] * 3),
    ],
)
def test_definition_of_a_linear_layer_has_its_types(build, monkeypatch, kind, types):
    monkeypatch.setattr(flashinfer_traces, "_spec_of", lambda _: a_spec("linear", kind))

    definition, axes = flashinfer_traces._described(build.a_record())

    tensors = [*definition["inputs"].values(), *definition["outputs"].values()]
    assert [tensor["dtype"] for tensor in tensors] == types
    assert definition_of(definition).workload(axes) == GemmWorkload(1, 4096, 4096)


def test_every_shipped_operation_is_covered():
    shipped = {name for name in operation_names() if declared_as_plain(name) is None}

    assert {*SHIPPED, "linear"} == shipped


@pytest.mark.parametrize(("of", "text"), SHIPPED.items())
def test_definition_of_an_operation_is_read_unchanged(of, text):
    for workload in choices(of, text):
        for kind in NUMBERS:
            definition = definition_json(workload, a_spec(of, kind))
            known = definition_of(json.loads(json.dumps(definition)))

            assert known.is_ours
            assert known.workload(variable_axes(definition, workload)) == workload


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(("of", "text"), SHIPPED.items())
def test_reference_of_an_operation_computes_the_declared_outputs(of, text, kind):
    workload, spec = operation(of).workload(**operation(of).parse(text)), a_spec(of, kind)
    definition = definition_json(workload, spec)
    axes = definition["axes"]
    sizes = {name: axis.get("value") for name, axis in axes.items()}
    sizes |= variable_axes(definition, workload)
    case = OperationCase(workload, spec)
    drawn = case.draw(case.definition.inputs, torch.Generator().manual_seed(0))
    given = {}
    for name, value in drawn.items():
        for part, tensor in value.tensors.items():
            given[name + ("_scales" if part == "scales" else "")] = tensor
    space: dict = {}
    exec(definition["reference"], space)

    made = space["run"](*(given[name] for name in definition["inputs"]))

    for name, tensor in definition["inputs"].items():
        assert list(given[name].shape) == [sizes[axis] for axis in tensor["shape"]]
        assert str(given[name].dtype) == f"torch.{tensor['dtype']}"
    outputs = made if isinstance(made, tuple) else (made,)
    for output, tensor in zip(outputs, definition["outputs"].values(), strict=True):
        assert list(output.shape) == [sizes[axis] for axis in tensor["shape"]]
        assert str(output.dtype) == f"torch.{tensor['dtype']}"
        assert output.float().any()
