"""The kernel for the most tokens: its sums as floats, the outputs that blocks share."""

from __future__ import annotations

import operands
import pytest
import torch

from kernels.contract import LinearKernel
from kernels.cuda.imma_choices import bulk
from kernels.cuda.imma_configs import BulkConfig, WgmmaConfig
from kernels.formats import Operand
from kernels.reference import reference_gemm
from kernels.registry import resolve
from kernels.runtime.gpu import current_gpu

LABELS = ("flexq-imma-w6a6", "flexq-imma-w6a8")
# Of one scale a group and sum in the same order: the same bits.
WARPGROUPS = WgmmaConfig(1, 2, 3, 1)


@pytest.fixture(autouse=True)
def _only_on_hopper() -> None:
    if current_gpu().arch != "sm_90":
        pytest.skip("warpgroup MMA is Hopper's")


def linear_kernel(label: str) -> LinearKernel:
    kernel = resolve(label, "cuda")
    assert isinstance(kernel, LinearKernel)
    return kernel


def random_operands(kernel: LinearKernel, m: int, n: int, k: int) -> tuple[Operand, Operand]:
    """Random codes over the whole range, scales over decades."""
    a = kernel.spec.activation
    x = operands.unit_operand(operands.random_codes(m, k, a.bits, seed=m + k), a.bits, a.group)
    w = operands.random_weight(kernel.spec.weight, n, k, seed=n)
    return operands.rescaled(x, seed=1).to("cuda"), operands.rescaled(w, seed=2).to("cuda")


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("config", [c for c in bulk() if not c.split], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 72, 128), (300, 1000, 1000), (700, 4104, 2048)])
def test_whole_outputs_are_those_of_the_warpgroup_kernel_bit_for_bit(
    label: str, config: BulkConfig, m: int, n: int, k: int
) -> None:
    kernel = linear_kernel(label)
    x, w = random_operands(kernel, m, n, k)
    packed_x, packed_w = kernel.pack_activation(x), kernel.pack_weight(w)
    bias = torch.linspace(-1, 1, n, device="cuda").half()
    outs = [torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2)]

    for out, chosen in zip(outs, (config, WARPGROUPS), strict=True):
        kernel.gemm(packed_x, packed_w, out, bias=bias, config=chosen)

    assert torch.equal(*outs)


@pytest.mark.parametrize("config", [c for c in bulk() if c.split], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 256, 4096), (257, 1000, 4096), (700, 2048, 1024), (128, 17000, 1024)]
)
def test_shared_outputs_are_the_same_at_every_launch(
    config: BulkConfig, m: int, n: int, k: int
) -> None:
    kernel = linear_kernel("flexq-imma-w6a6")
    x, w = random_operands(kernel, m, n, k)
    packed_x, packed_w = kernel.pack_activation(x), kernel.pack_weight(w)
    outs = [torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda") for _ in range(5)]

    for out in outs:
        kernel.gemm(packed_x, packed_w, out, config=config)

    reference = reference_gemm(x.to("cpu"), w.to("cpu"))
    fits = reference.y.abs() < 65504
    off = (outs[0].cpu().double() - reference.y).abs()[fits]
    near = 1e-3 * reference.y.abs() + 1e-5 * reference.magnitude + 2.0**-24
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert bool((off <= near[fits]).all())


@pytest.mark.parametrize("config", bulk(), ids=str)
@pytest.mark.parametrize(("x_code", "w_code"), [(-128, -32), (-128, 31), (127, -32)])
def test_the_largest_sums_stay_in_the_binade(config: BulkConfig, x_code: int, w_code: int) -> None:
    kernel = linear_kernel("flexq-imma-w6a8")
    m, n, k = 130, 192, 2048
    x = operands.unit_operand(torch.full((m, k), x_code, dtype=torch.int8), 8, 128, 0.25)
    w = operands.unit_operand(torch.full((n, k), w_code, dtype=torch.int8), 6, 128, 2.0**-12)
    out = torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda")

    packed_x, packed_w = kernel.pack_activation(x.to("cuda")), kernel.pack_weight(w.to("cuda"))
    kernel.gemm(packed_x, packed_w, out, config=config)

    assert bool((out == x_code * w_code * k * 2.0**-14).all())


@pytest.mark.parametrize("config", bulk(), ids=str)
def test_a_scale_that_is_no_number_spoils_its_row_alone(config: BulkConfig) -> None:
    kernel = linear_kernel("flexq-imma-w6a6")
    m, n, k = 600, 300 * current_gpu().sms // 10, 1024
    x, w = random_operands(kernel, m, n, k)
    assert w.scales is not None
    packed_x, sound = kernel.pack_activation(x), torch.empty(m, n, dtype=torch.float16).cuda()
    kernel.gemm(packed_x, kernel.pack_weight(w), sound, config=config)
    w.scales[5, 2] = torch.inf
    out = torch.empty_like(sound)

    kernel.gemm(packed_x, kernel.pack_weight(w), out, config=config)

    others = torch.arange(n, device="cuda") != 5
    assert not bool(out[:, 5].isfinite().any())
    assert torch.equal(out[:, others], sound[:, others])
