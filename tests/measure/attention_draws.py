"""Draws of attention as the decoder runs it, judged as a measurement judges them."""

from __future__ import annotations

import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.operand_tensors import Value, buffers_of
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.measure.operation_subject import judge_outputs
from flexq_bench.workloads.operation import operation

TOLERANCE = 1e-3  # of the protocol


def judged(kernel, text, seed, *, sharpness, factor, device):
    """The error of a kernel's results times a factor; empty: right. sharpness: of the scores."""
    definition = operation(kernel.spec.operation)
    of = OperationCase(definition.workload(**definition.parse(text)), kernel.spec)
    inputs = of.draw(definition.inputs, torch.Generator(device).manual_seed(seed))
    name = "qkv" if "qkv" in inputs else "q"
    plain = inputs[name].plain.clone()
    queries = plain[:, : plain.shape[1] // 2] if name == "qkv" else plain
    queries *= sharpness
    inputs[name] = Value.of(plain, plain.dtype)
    streamed = {tensor.name for tensor in of.streamed("hot")}
    state = {n: v for n, v in inputs.items() if n in streamed}
    fresh = {n: v for n, v in inputs.items() if n not in streamed}
    packed = kernel.prepare(of.workload, PackedOperand(buffers_of(state), 0, 0).clone())
    given = PackedOperand(buffers_of(fresh), 0, 0).clone()
    out = of.outputs(torch.device(device))
    made = kernel.launch(of.workload, given, packed, out, None) or out
    made = {n: (y.float() * factor).to(y.dtype) for n, y in made.items()}
    return judge_outputs(of, inputs, made, TOLERANCE).detail


def errors(seeds, context, *, device="cpu", **how):
    kernel = registry.resolve("decoder-attention", device)
    text = f"batch=2 context={context} heads=4 kv_heads=2 head_dim=32"
    return [seed for seed in seeds if judged(kernel, text, seed, device=device, **how)]
