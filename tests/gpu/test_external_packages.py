"""Outside packages' kernels where they are installed, checked as every measurement checks them."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.registry import labels, resolve
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import check_linear
from flexq_bench.measure.inputs import LinearInputs
from flexq_bench.workloads.case import Case, Stage
from flexq_bench.workloads.gemm import GemmWorkload

PEERS = [
    label
    for label in labels("cuda")
    if resolve(label, "cuda").spec.package and isinstance(resolve(label, "cuda"), LinearKernel)
]


@pytest.mark.parametrize("stage", ["gemm", "linear"])
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (8, 4096, 11008), (33, 1024, 512)])
@pytest.mark.parametrize("label", PEERS)
def test_external_kernel_is_correct_as_measured(
    label: str, shape: tuple[int, int, int], stage: Stage
) -> None:
    kernel = resolve(label, "cuda")
    assert isinstance(kernel, LinearKernel)
    try:
        kernel.spec.check_capability(torch.cuda.get_device_capability())
    except UnsupportedError as error:
        pytest.skip(str(error))

    def run(inputs: LinearInputs, out: torch.Tensor) -> torch.Tensor | None:
        w = kernel.pack_weight(inputs.w)
        if stage == "gemm":
            return kernel.gemm(kernel.pack_activation(inputs.x), w, out)
        assert inputs.x_real is not None
        packed = kernel.empty_activation(out.shape[0], w.k, out.device)
        return kernel.linear(inputs.x_real, packed, w, out)

    case = Case(kernel.spec.name, GemmWorkload(*shape), stage=stage)
    bound = BoundKernel(kernel, kernel.spec, case, torch.device("cuda"))
    result = check_linear(bound, run, seed=7, tolerance=1e-3)

    assert result.is_correct, result.detail
