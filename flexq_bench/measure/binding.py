"""The subject of a case, by what its kernel is."""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import Kernel, KernelSpec, OperationKernel, Probe, RankKernel
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.inputs import derive_seed
from flexq_bench.measure.linear_subject import LinearSubject, layer_weights
from flexq_bench.measure.operation_subject import OperationSubject
from flexq_bench.measure.probe_subject import ProbeSubject
from flexq_bench.measure.subject import Subject
from flexq_bench.measure.weight_rotation import SharedWeights
from flexq_bench.workloads.case import Case


def bind(
    kernel: Kernel,
    spec: KernelSpec,
    case: Case,
    device: torch.device,
    seed: int,
    rewriting: Rewriting,
    shared: SharedWeights,
) -> Subject:
    """The subject of a case: draw its inputs from the seed and pack them.

    spec: of the kernel, which its code can't change. The kernel's name does not affect the draw:
    all kernels have the same real values. M does not affect the weights: cases of one kernel and
    layer find them in `shared`. Inputs that change between samples are drawn from the secret of
    `rewriting`. Raises UnsupportedError for a kernel of several GPUs.
    """
    if isinstance(kernel, Probe):
        drawn = derive_seed(seed, case.gemm, "timed")
        return ProbeSubject(kernel, spec, case.gemm, device, drawn)
    if isinstance(kernel, OperationKernel):
        return OperationSubject(kernel, spec, case, device, seed, rewriting, shared)
    if isinstance(kernel, RankKernel):
        raise UnsupportedError(f"{spec.label} needs {case.gpus} GPUs, and this uses one")
    n, k = case.gemm.n, case.gemm.k
    bound = BoundKernel(kernel, spec, case, device)
    weights = shared.get(
        (spec.label, n, k, seed, rewriting.secret),
        lambda: layer_weights(bound, seed, rewriting.secret),
    )
    return LinearSubject(bound, seed, rewriting, weights)
