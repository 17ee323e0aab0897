"""Kernels of any operation: the ones that people have, right and wrong, on a CPU."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from flexq_bench import api
from flexq_bench.errors import MeasureError
from flexq_bench.kernels import registry
from flexq_bench.kernels.external.loading import load
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure.judged_work import OwnReference
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.measure.operation_subject import judge_outputs
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import operation

FILE = Path(__file__).parents[1] / "kernels" / "operations_in_torch.py"
SHAPES = {
    "grouped": ("grouped_linear", "tokens=5 experts=8 top_k=2 n=32 k=64"),
    "masked": ("grouped_linear", "tokens=5 experts=8 top_k=2 n=32 k=64 skew=60 layout=masked"),
    "sdpa": ("attention_decode", "batch=2 context=40 heads=4 kv_heads=2 head_dim=32"),
    "int8-cache": ("attention_decode", "batch=2 context=40 heads=4 kv_heads=2 head_dim=32"),
    "prefill": ("attention_prefill", "tokens=9 past=6 heads=4 kv_heads=2 head_dim=32"),
    "norm-int8": ("norm_quantize", "tokens=4 hidden=256"),
    "add-norm-fp8": ("norm_quantize", "tokens=4 hidden=256 residual=add norm=layer"),
    "in-place": ("norm_quantize", "tokens=4 hidden=256 residual=add"),
    "silu": ("activation_quantize", "tokens=4 hidden=256"),
    "rope": ("rope_cache_write", "tokens=4 heads=4 kv_heads=2 head_dim=32 slots=16"),
    "sampling": ("top_k_sampling", "tokens=2 vocabulary=128256"),
}


def definitions():
    """The declared functions of the file, by name."""
    module = load(KernelSource.parse(str(FILE))).kernels
    return {kernel.spec.name.partition(".")[2]: kernel for kernel in module}


KERNELS = definitions()


def measured(a_meter, kernel, cache=""):
    cache = cache or ("cold" if kernel.spec.updates else "hot")
    name = kernel.spec.name.partition(".")[2] or kernel.spec.name
    workload, stage = GemmWorkload(2, 64, 256), "gemm"
    if name in SHAPES:
        of, text = SHAPES[name]
        workload, stage = operation(of).workload(**operation(of).parse(text)), "op"
    case = Case(kernel.spec.name, workload, variant=kernel.spec.variant, stage=stage, cache=cache)
    return a_meter(kernel).measure(case)


def with_function(kernel, function):
    """The kernel of another function with the same declaration."""
    declared = replace(kernel._declared, function=function)
    other = type(kernel)(declared, "cpu")
    other.spec = kernel.spec
    return other


def spoiled(kernel):
    """A kernel whose results are wrong by little: numbers by 3 %, integers by 2."""
    function = kernel._declared.function

    def off(out):
        wide = out.float()
        return (wide * 1.03 if out.is_floating_point() else wide + 2).to(out.dtype)

    def returning(*given, **named):
        return off(function(*given, **named))

    def writing(*given, **named):
        function(*given, **named)
        two = kernel.spec.operation == "norm_quantize" and not kernel.spec.updates
        outputs = 2 if two else 1
        for out in given[-outputs:]:
            out.copy_(off(out))

    writing.__signature__ = returning.__signature__ = inspect.signature(function)
    return with_function(kernel, returning if kernel._declared.returns else writing)


# Of each operation one; the others are slow tests.
FAST = {
    *("grouped", "sdpa", "prefill", "add-norm-fp8", "in-place", "silu", "rope"),
    "sampling",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in KERNELS]
)
def test_listed_kernel_is_right_and_its_spoiled_variant_wrong(a_meter, name):
    right = measured(a_meter, KERNELS[name])
    wrong = measured(a_meter, spoiled(KERNELS[name]))

    assert right.status in ("ok", "noisy"), right.detail
    assert wrong.status == "incorrect", (wrong.status, wrong.detail)


@pytest.mark.parametrize(
    "name",
    [
        "sdpa",
        "norm-int8",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("grouped", "sampling")),
    ],
)
def test_listed_kernel_is_measured_cold(a_meter, name):
    result = measured(a_meter, KERNELS[name], cache="cold")

    assert result.status in ("ok", "noisy"), result.detail
    assert result.extra["copies"] > 1


@pytest.mark.parametrize("name", ["returning", "sdpa"])
def test_returned_result_of_an_earlier_launch_is_wrong(a_meter, name):
    function, first = KERNELS[name]._declared.function, []

    def repeating(*given, **named):
        first.append(function(*given, **named))
        return first[(len(first) - 1) // 8 * 8]

    repeating.__signature__ = inspect.signature(function)
    assert measured(a_meter, with_function(KERNELS[name], repeating)).status == "incorrect"


@pytest.mark.parametrize(
    "name",
    ["grouped-dual-w6a8", "grouped-dgq-w4a8", "grouped-w8a8", "grouped-flexq-w6a8[bf16]"],
)
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_experts_are_right_with_skew_and_without_tokens(a_meter, name, layout):
    of = operation("grouped_linear")
    text = f"tokens=5 experts=8 top_k=2 n=40 k=192 skew=60 layout={layout}"
    case = Case(name, of.workload(**of.parse(text)), stage="op", cache="hot")

    result = a_meter(registry.resolve(name, "cpu")).measure(case)

    assert result.status in ("ok", "noisy"), result.detail


def test_listed_kernels_take_at_most_thirty_lines():
    for kernel in KERNELS.values():
        assert len(inspect.getsource(kernel._declared.function).splitlines()) <= 30


def test_kernel_is_refused_at_an_operation_of_another_name(a_meter):
    workload = operation("all_reduce").workload(elements=8)
    kernel = KERNELS["norm-int8"]

    result = a_meter(kernel).measure(Case(kernel.spec.name, workload, stage="op", cache="hot"))

    assert (result.status, result.detail) == (
        "unsupported",
        f"{kernel.spec.label} computes norm_quantize, not all_reduce",
    )


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (lambda: api.kernel("attention", "a"), WorkloadError, "attention_decode"),
        (
            lambda: api.kernel("all_reduce", "a", quantize_activation=len)(print),
            api.DefinitionError,
            "quantize_activation is of linear kernels",
        ),
        (
            lambda: api.kernel("all_reduce", "a", dtype="fp8")(print),
            api.DefinitionError,
            "no dtype",
        ),
        *(
            (
                lambda pair=pair: api.kernel("norm_quantize", "a", updates=dict([pair]))(print),
                api.DefinitionError,
                f"{pair[0]} of norm_quantize can't be written in {pair[1]}",
            )
            for pair in (("total", "x"), ("y", "residual"), ("z", "x"), ("y", "z"))
        ),
    ],
)
def test_kernel_that_cannot_run_is_refused_when_declared(declare, error, message):
    with pytest.raises(error, match=message):
        declare()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"parameters": ["n", "top_p=0.9"]}, WorkloadError, "a default is a whole number"),
        ({"number": "half"}, api.ShapeError, "half"),
        ({"distribution": "gaussian"}, WorkloadError, "no distribution 'gaussian'"),
        ({"distribution": "below m"}, WorkloadError, "no parameter 'm'"),
        ({"number": "int32", "role": "index"}, WorkloadError, "x is int32: its distribution"),
        ({"number": "bool"}, WorkloadError, "below 2 for bool"),
    ],
)
def test_operation_that_cannot_be_drawn_is_refused_when_declared(fields, error, message):
    given = {"number": "fp32", "role": "activation", **fields}
    parameters = given.pop("parameters", ["n"])
    with pytest.raises(error, match=message):
        api.operation(
            "undrawable",
            parameters=parameters,
            inputs=[api.Input("x", ("n",), **given)],
            outputs=[api.Output("y", ("n",), "fp32")],
        )(print)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("residual.add_(x * 1.05)", "elements wrong"),
        ("total = residual + x", "elements wrong"),
        ("residual.add_(x), gamma.add_(0.01)", "launches write into gamma"),
        ("residual.add_(x), x.add_(1)", "launches write into x"),
    ],
)
def test_wrong_writes_into_inputs_are_detected(a_meter, line, detail):
    def kernel(x, residual, gamma, y):
        total = residual.add(x).float()
        y.copy_(torch.nn.functional.rms_norm(total, gamma.shape, gamma.float(), 1e-6))
        exec(line)

    result = measured(a_meter, with_function(KERNELS["in-place"], kernel))

    assert (result.status, detail in result.detail) == ("incorrect", True), result.detail


def test_case_without_elements_of_outputs_is_unsupported(a_meter):
    @api.operation(
        "nothing",
        parameters=[api.Parameter("n", "", minimum=0)],
        inputs=[api.Input("x", ("n",), "fp32", "activation")],
        outputs=[api.Output("y", ("n",), "fp32")],
    )
    def nothing(x):
        return x

    kernel = api.kernel(nothing, "nothing", backends=["cpu"])(lambda: None).kernels()[0]
    result = a_meter(kernel).measure(Case("nothing", nothing.workload(n=0), stage="op"))

    assert (result.status, "has an element" in result.detail) == ("unsupported", True)


def test_kernel_that_writes_into_inputs_has_no_hot_times(a_meter):
    result = measured(a_meter, KERNELS["in-place"], cache="hot")

    assert (result.status, "measure it cold" in result.detail) == ("unsupported", True)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (lambda logits: logits[:, 0] * torch.nan, "only NaN for token"),
        (lambda logits: logits[:, 0].tolist(), "returns a list for token"),
        (lambda logits: logits[:, 1 // 0], "raises ZeroDivisionError: integer"),
    ],
)
def test_faults_of_a_reference_are_not_the_kernels(reference, message):
    of = operation("top_k_sampling")
    kernel, case = KERNELS["sampling"], of.workload(**of.parse("tokens=2 vocabulary=64"))
    judging = OperationCase(case, kernel.spec)
    judging.definition = replace(of, reference=reference)
    inputs = judging.draw(of.inputs, torch.Generator())

    with pytest.raises(MeasureError, match=message):
        judging.expected(inputs)


def test_reference_that_is_not_deterministic_is_named():
    of = operation("top_k_sampling")
    kernel, case = KERNELS["sampling"], of.workload(**of.parse("tokens=2 vocabulary=64"))
    judging = OperationCase(case, kernel.spec)
    calls = count()
    judging.definition = replace(
        of, accepts=None, reference=lambda logits: torch.full_like(logits[:, 0], next(calls))
    )
    inputs = judging.draw(of.inputs, torch.Generator().manual_seed(0))
    outputs = {"token.values": torch.full((2,), 63)}

    with pytest.raises(MeasureError, match="the reference of top_k_sampling is not deterministic"):
        judge_outputs(judging, inputs, outputs, 1e-3)


def test_inputs_that_are_not_of_the_seed_are_named():
    calls = count()

    @api.operation(
        "drawn",
        parameters=["n"],
        inputs=[api.Input("x", ("n",), "fp32", "activation")],
        outputs=[api.Output("y", ("n",), "fp32")],
        draw=lambda values, _generator: {"x": torch.full((values["n"],), next(calls))},
    )
    def drawn(x):
        return x

    (kernel,) = api.kernel(drawn, "drawn", backends=["cpu"])(lambda x, y: y.copy_(x)).kernels()
    case = Case("drawn", drawn.workload(n=4), stage="op")
    reference = OwnReference(case, kernel.spec, torch.device("cpu"), 1e-3)

    with pytest.raises(MeasureError, match="drawn draws other inputs from the same seed"):
        reference.judge(1, 2, {"y.values": torch.full((4,), 9.0)})


def test_rule_that_is_not_deterministic_is_named():
    of = operation("top_k_sampling")
    kernel, case = KERNELS["sampling"], of.workload(**of.parse("tokens=2 vocabulary=64"))
    judging = OperationCase(case, kernel.spec)
    calls = count()
    judging.definition = replace(
        of, accepts=lambda token: {"token": torch.full_like(token, next(calls) % 2).bool()}
    )
    inputs = judging.draw(of.inputs, torch.Generator().manual_seed(0))

    with pytest.raises(MeasureError, match="`accepts` of top_k_sampling is not deterministic"):
        judge_outputs(judging, inputs, {"token.values": torch.full((2,), 63)}, 1e-3)


def test_static_values_are_those_of_the_first_weights(a_meter):
    def prepare(w, scales):
        return w, scales, {"first": int(w.sum())}

    @api.linear_kernel(
        "static", weight="int8/row", backends=["cpu"], prepare_weight=prepare, dtype="fp32"
    )
    def kernel(x, w, scales, static, out):
        seen.add(static["first"])
        out.copy_((x.float() @ w.float().T) * scales[:, 0].float())

    seen: set[int] = set()
    assert measured(a_meter, kernel.kernels()[0]).status in ("ok", "noisy")
    assert len(seen) == 1


def test_registered_kernels_have_the_operation_in_their_spec():
    registry.add(KERNELS.values())
    try:
        spec = registry.resolve(KERNELS["sampling"].spec.label, "cpu").spec
    finally:
        registry.remove(kernel.spec.label for kernel in KERNELS.values())
    assert (spec.operation, spec.stages) == ("top_k_sampling", ("op",))
    assert torch.float16 == spec.output_dtype


@pytest.mark.parametrize(
    ("label", "of", "text"),
    [
        ("decoder-norm", "norm_quantize", "tokens=3 hidden=256 residual=add"),
        ("decoder-norm[int8]", "norm_quantize", "tokens=3 hidden=256"),
        ("decoder-silu-mul", "activation_quantize", "tokens=3 hidden=256"),
        ("decoder-silu-mul[int8]", "activation_quantize", "tokens=3 hidden=256"),
        (
            "decoder-attention",
            "decoder_attention",
            "batch=2 context=9 heads=4 kv_heads=2 head_dim=32",
        ),
    ],
)
def test_operators_of_the_decoder_are_kernels_of_operations(a_meter, label, of, text):
    kernel = registry.resolve(label, "cpu")
    workload = operation(of).workload(**operation(of).parse(text))
    case = Case(kernel.spec.name, workload, variant=kernel.spec.variant, stage="op", cache="hot")

    result = a_meter(kernel).measure(case)

    assert result.status in ("ok", "noisy"), result.detail


def test_epilogue_of_a_linear_layer_is_judged_with_its_parameters(a_meter):
    @api.kernel("linear_epilogue", "fused", backends=["cpu"], dtype="bf16")
    def fused(x, w, bias, residual, y):
        made = torch.nn.functional.gelu(x.float() @ w.float().T + bias.float())
        y.copy_(made + residual.float())

    def measured_with(**values):
        workload = operation("linear_epilogue").workload(m=2, n=32, k=64, residual="add", **values)
        (kernel,) = fused.kernels()
        return a_meter(kernel).measure(Case("fused", workload, stage="op", cache="hot"))

    assert measured_with(function="gelu").status in ("ok", "noisy")
    assert measured_with(function="silu").status == "incorrect"
