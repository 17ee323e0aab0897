"""Codes of honest kernels, which round intermediate results to their type, on many inputs."""

import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.operand_tensors import buffers_of
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.measure.operation_subject import judge_outputs
from flexq_bench.workloads.case import Case

CASE = Case.from_key(
    "decoder-norm[int8] op hot norm_quantize:tokens=3,hidden=256,norm=rms,residual=add"
)


def test_honest_codes_are_right_on_all_of_many_draws():
    kernel = registry.resolve(CASE.label, "cpu")
    of = OperationCase(CASE.workload, kernel.spec)

    def wrong(seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = of.draw(of.definition.inputs, generator)
        out = of.outputs(torch.device("cpu"))
        x, nothing = PackedOperand(buffers_of(inputs), 0, 0), PackedOperand({}, 0, 0)
        made = kernel.launch(of.workload, x, nothing, out, None)
        return judge_outputs(of, inputs, made or out, 1e-3).detail

    assert [detail for seed in range(200) if (detail := wrong(seed))] == []
