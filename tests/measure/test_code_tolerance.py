"""Codes of honest kernels, which round intermediate results to their type, on many inputs."""

from dataclasses import replace

import pytest
import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.kernels.operand_tensors import buffers_of
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.measure.operation_subject import judge_outputs
from flexq_bench.workloads.case import Case

CASE = Case.from_key(
    "decoder-norm[int8] op hot norm_quantize:tokens=3,hidden=256,norm=rms,residual=add"
)


def drawn(of, seed):
    return of.draw(of.definition.inputs, torch.Generator().manual_seed(seed))


def test_honest_codes_are_right_on_all_of_many_draws():
    kernel = registry.resolve(CASE.label, "cpu")
    of = OperationCase(CASE.workload, kernel.spec)

    def wrong(seed):
        inputs = drawn(of, seed)
        out = of.outputs(torch.device("cpu"))
        x, nothing = PackedOperand(buffers_of(inputs), 0, 0), PackedOperand({}, 0, 0)
        made = kernel.launch(of.workload, x, nothing, out, None)
        return judge_outputs(of, inputs, made or out, 1e-3).detail

    assert [detail for seed in range(200) if (detail := wrong(seed))] == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int8/row", "fp16"),
        ("fp8/row@fp32", "fp16"),
        ("fp8/row@fp32", "bf16"),
        ("fp8-e5m2/row@fp32", "bf16"),
    ],
)
def test_codes_of_values_three_percent_off_are_wrong(name, dtype):
    spec = registry.resolve("decoder-norm[int8]", "cpu").spec
    spec = replace(spec, activation=NumberFormat.parse(name), output=dtype)
    of = OperationCase(CASE.workload, spec)
    inputs = drawn(of, 1)
    x, residual, gamma = (inputs[n].real().double() for n in ("x", "residual", "gamma"))
    total = x + residual
    y = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma
    out = of.outputs(torch.device("cpu"))
    codes, scales = out["y.codes"], out["y.scales"]
    out["total.values"].copy_(total)
    scales.copy_((y.abs().amax(-1, keepdim=True) / spec.activation.top).view(scales.shape))

    def judged(factor):
        quotients = factor * y / scales.double()
        top = spec.activation.top
        whole = quotients.round() if codes.dtype == torch.int8 else quotients
        codes.copy_(whole.clamp(-top, top).to(codes.dtype))
        return judge_outputs(of, inputs, out, 1e-3).detail

    assert not judged(1.0)
    assert "elements wrong" in judged(1.03)
