from __future__ import annotations

import subprocess
import sys

import pytest

from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import evaluate
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import (
    Input,
    Operation,
    OperationWorkload,
    Output,
    Parameter,
    declare,
    operation,
    operation_names,
)


class Format:
    def __init__(self, bits, group=None):
        self.bits, self.group = bits, group


@pytest.fixture
def routed():
    return Operation(
        name="routed",
        summary="rows by experts",
        parameters=(
            Parameter("tokens", "tokens", is_axis=True),
            Parameter("experts", "experts"),
            Parameter("top_k", "experts of a token", default=2),
            Parameter("layout", "order of rows", default="masked", choices=("masked", "paged")),
        ),
        inputs=(Input("x", ("tokens * top_k", "64"), "fp16", "activation"),),
        outputs=(Output("y", ("ceil(tokens / 16) * 16",), "fp16"),),
        bytes="min(experts, tokens * top_k) * weight_bytes(64, 128)",
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tokens * top_k", 16),
        ("ceil(tokens / 3)", 3),
        ("tokens // 3 - 1", 1),
        ("tokens / 16", 0.5),
        ("max(tokens, 2 ** top_k, 9)", 9),
        ("1 if layout == 'paged' else 2", 2),
        ("-(tokens % 3) + 2", 0),
        ("3 if tokens >= 8 and top_k < 3 else 4", 3),
    ],
)
def test_expression_has_the_value_of_its_arithmetic(text, value):
    result = evaluate(text, {"tokens": 8, "top_k": 2, "layout": "masked"})

    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "tokens.real",
        "tokens[0]",
        "lambda: 1",
        "[1]",
        "unknown",
        "1 / 0",
        "9 ** 9 ** 9",
        "tokens +",
        "'a' * 3",
        "tokens < 'a'",
        "1" + "+1" * 400,
        "-" * 90 + "1",
        "",
        "True",
        "f(1)",
        "'word'",
        "2 ** 64",
        "1e400",
    ],
)
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(WorkloadError):
        evaluate(text, {"tokens": 8})


def test_parameters_read_back_in_declared_order(routed):
    values = routed.parse("experts=128,tokens=8 layout=paged")

    assert routed.format(values) == "tokens=8 experts=128 top_k=2 layout=paged"
    assert routed.parse(routed.format(values)) == values


@pytest.mark.parametrize(
    "text",
    [
        "tokens=8",
        "tokens=8 experts=1 heads=2",
        "tokens=0 experts=1",
        "tokens=8 experts=1 layout=other",
        "tokens=masked experts=1",
        "tokens=8 tokens=9 experts=1",
        "tokens: 8",
        "tokens=99999999 experts=1",
    ],
)
def test_invalid_parameters_are_refused(routed, text):
    with pytest.raises(WorkloadError):
        routed.parse(text)


def test_shapes_and_bytes_follow_from_parameters(routed):
    values = routed.parse("tokens=3 experts=4")

    assert routed.shape_of("x", values) == (6, 64)
    assert routed.shape_of("y", values) == (16,)
    moved = routed.evaluate(routed.bytes, values, {"weight": Format(4, 32)})
    assert moved == 4 * (64 * 128 // 2 + 64 * 128 // 32 * 2)


def test_shape_that_is_no_whole_number_is_refused(routed):
    definition = Operation("halves", "", routed.parameters, (), (Output("y", ("tokens/2",), "x"),))

    with pytest.raises(WorkloadError, match="tokens/2"):
        definition.shape_of("y", definition.parse("tokens=3 experts=1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Routed"},
        {"bytes": "heads * 2"},
        {"inputs": (Input("x", ("heads",), "fp16", "activation"),)},
        {"inputs": (Input("x", ("1",), "fp16", "lucky"),)},
        {"outputs": (Output("x", ("1",), "fp16"), Output("x", ("1",), "fp16"))},
        {"parameters": (Parameter("a", ""), Parameter("a", ""))},
    ],
)
def test_invalid_definition_is_refused(changes):
    arguments = {"name": "a", "summary": "", "parameters": (), "inputs": (), "outputs": ()}

    with pytest.raises(WorkloadError):
        Operation(**{**arguments, **changes})


def test_case_of_an_operation_reads_back_from_its_key(routed):
    workload = routed.workload(tokens=8, experts=128)
    case = Case("mine", workload, "a", stage="op", cache="hot", regime="sustained")

    assert case.key == (
        "mine[a] op hot routed:tokens=8,experts=128,top_k=2,layout=masked sustained"
    )
    assert Case.from_key(case.key) == case
    with pytest.raises(WorkloadError, match="no GEMM"):
        _ = case.gemm


@pytest.mark.parametrize("stage", ["gemm", "op"])
def test_stage_of_another_operation_is_refused(stage):
    linear = GemmWorkload(1, 2, 3)
    other = OperationWorkload("routed", (("tokens", 1),))

    with pytest.raises(WorkloadError):
        Case("k", other if stage == "gemm" else linear, stage=stage)


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
@pytest.mark.parametrize("group", [None, 128])
def test_linear_definition_has_the_bytes_and_operations_of_gemms(bits, group):
    gemm, linear = GemmWorkload(8, 512, 4096), operation("linear")

    values = dict(gemm.values)
    moved = linear.evaluate(linear.bytes, values, {"weight": Format(bits, group)})
    assert moved == gemm.weight_bytes(bits, group)
    assert linear.evaluate(linear.operations, values) == gemm.operations


def test_declared_operation_is_found_by_name(routed, monkeypatch):
    monkeypatch.setattr("flexq_bench.workloads.operation._declared", {})
    declare(routed)

    assert operation("routed") is routed
    assert operation_names()[0] == "linear"
    assert "routed" in operation_names()
    with pytest.raises(WorkloadError):
        declare(Operation("linear", "", (), (), ()))
    with pytest.raises(WorkloadError):
        declare(Operation("routed", "another", (), (), ()))


def test_definitions_are_read_without_torch():
    code = (
        "import sys; from flexq_bench.workloads.operation import operation, operation_names;"
        "[operation(name) for name in operation_names()]; sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
