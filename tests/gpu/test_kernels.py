"""Every CUDA kernel, in every configuration, against references that share nothing with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import operands
import pytest
import torch

from kernels.contract import Config, LinearKernel
from kernels.formats import Operand
from kernels.reference import reference_gemm
from kernels.registry import labels, resolve
from workloads.gemm import GemmWorkload

ALL_LINEAR = [label for label in labels("cuda") if isinstance(resolve(label, "cuda"), LinearKernel)]
ABQ = [label for label in ALL_LINEAR if label.startswith("abq-")]
# 49 widths of one source: these stand for all of them where there are many shapes.
ABQ_CHOSEN = {"abq-w2a2", "abq-w2a8", "abq-w3a5", "abq-w6a6", "abq-w6a8", "abq-w7a3", "abq-w8a8"}
LINEAR = [
    label
    for label in ALL_LINEAR
    if label not in ABQ or label in ABQ_CHOSEN or resolve(label, "cuda").spec.variant
]
INTEGER = [label for label in LINEAR if resolve(label, "cuda").spec.weight.is_integer]
PROBES = [label for label in labels("cuda") if label not in ALL_LINEAR]
SHAPES = [
    *product((1, 2, 3, 8, 9, 16, 17), (100, 4096), (64, 576)),
    *product((1, 5, 33), (1, 8), (1, 4096)),
    (1, 12288, 4096),
    (8, 4096, 11008),
    (64, 300, 1111),
]


def linear_kernel(label: str) -> LinearKernel:
    kernel = resolve(label, "cuda")
    assert isinstance(kernel, LinearKernel)
    return kernel


def configs_of(kernel: LinearKernel, gemm: GemmWorkload) -> Sequence[Config | None]:
    return [None, *kernel.candidates(gemm)]


def multiply(
    kernel: LinearKernel, x: Operand, w: Operand, config: Config | None = None
) -> torch.Tensor:
    out = torch.full((x.rows, w.rows), torch.nan, dtype=torch.float16, device="cuda")
    kernel.gemm(
        kernel.pack_activation(x.to("cuda")), kernel.pack_weight(w.to("cuda")), out, config=config
    )
    return out.cpu()


def coded_operands(
    kernel: LinearKernel, m: int, n: int, k: int, x_scale: float
) -> tuple[Operand, Operand]:
    a, b = kernel.spec.activation, kernel.spec.weight
    x = operands.random_codes(m, k, a.bits, seed=m * n + k)
    w = operands.random_codes(n, k, b.bits, seed=m + n * k)
    return operands.unit_operand(x, a.bits, a.group, x_scale), operands.unit_operand(
        w, b.bits, b.group
    )


def relative_error(out: torch.Tensor, x: Operand, w: Operand) -> float:
    reference = reference_gemm(x, w)
    scale = torch.maximum(reference.y.abs(), reference.magnitude * 2.0**-10).clamp(min=2.0**-14)
    error = (out.double() - reference.y).abs() / scale
    fits = reference.y.abs() < 65504
    return float(torch.where(fits, error, 0.0).nan_to_num(nan=torch.inf).max())


@pytest.mark.parametrize("label", INTEGER)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_integer_sums_are_exact(label: str, m: int, n: int, k: int) -> None:
    kernel = linear_kernel(label)
    x, w = coded_operands(kernel, m, n, k, 2.0**-10)

    out = multiply(kernel, x, w)

    sums = x.values.double() @ w.values.double().T
    assert torch.equal(out, (sums * 2.0**-10).half())


@pytest.mark.parametrize("label", ABQ)
def test_every_pair_of_widths_is_exact(label: str) -> None:
    kernel = linear_kernel(label)
    x, w = coded_operands(kernel, 11, 40, 700, 2.0**-10)

    out = multiply(kernel, x, w)

    sums = x.values.double() @ w.values.double().T
    assert torch.equal(out, (sums * 2.0**-10).half())


@pytest.mark.parametrize("label", INTEGER)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 100, 300), (4, 1000, 1111), (16, 72, 4096), (31, 72, 640)]
)
def test_every_configuration_is_exact(label: str, m: int, n: int, k: int) -> None:
    kernel = linear_kernel(label)
    x, w = coded_operands(kernel, m, n, k, 2.0**-10)
    expected = ((x.values.double() @ w.values.double().T) * 2.0**-10).half()

    wrong = [
        config
        for config in configs_of(kernel, GemmWorkload(m, n, k))
        if not torch.equal(multiply(kernel, x, w, config), expected)
    ]

    assert wrong == []


@pytest.mark.parametrize("label", INTEGER)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (8, 300, 576), (17, 100, 64), (3, 8, 1)]
)
def test_scales_over_eight_decades_keep_the_error_under_a_thousandth(
    label: str, m: int, n: int, k: int
) -> None:
    kernel = linear_kernel(label)
    x, w = coded_operands(kernel, m, n, k, 1.0)
    assert x.scales is not None
    assert w.scales is not None
    x = Operand(x.values, operands.random_scales(*x.scales.shape, seed=1), x.bits, x.group)
    w = Operand(w.values, operands.random_scales(*w.scales.shape, seed=2), w.bits, w.group)

    assert relative_error(multiply(kernel, x, w), x, w) <= 1e-3


@pytest.mark.parametrize("label", LINEAR)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (5, 100, 300), (16, 4096, 1024)])
def test_linear_quantizes_as_the_reference_does(label: str, m: int, n: int, k: int) -> None:
    kernel = linear_kernel(label)
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator).half()
    x[0, : k // 2] *= 1e-4
    weight = kernel.quantize_weight(torch.randn(n, k, generator=generator).half() * 0.02)
    out = torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda")
    packed = kernel.empty_activation(m, k, torch.device("cuda"))

    kernel.linear(x.cuda(), packed, kernel.pack_weight(weight.to("cuda")), out)

    quantized = kernel.quantize_activation(x)
    assert torch.equal(out.cpu(), multiply(kernel, quantized, weight))
    assert relative_error(out.cpu(), quantized, weight) <= 1e-3


@pytest.mark.parametrize("label", LINEAR)
def test_bias_is_added_once(label: str) -> None:
    kernel = linear_kernel(label)
    generator = torch.Generator().manual_seed(7)
    x = kernel.quantize_activation(torch.randn(3, 256, generator=generator).half())
    w = kernel.quantize_weight(torch.zeros(20, 256).half())
    bias = torch.randn(20, generator=generator).half().cuda()
    out = torch.empty(3, 20, dtype=torch.float16, device="cuda")

    kernel.gemm(
        kernel.pack_activation(x.to("cuda")), kernel.pack_weight(w.to("cuda")), out, bias=bias
    )

    assert torch.equal(out, bias.expand(3, 20))


@pytest.mark.parametrize("label", LINEAR)
def test_the_same_launch_gives_the_same_bits(label: str) -> None:
    kernel = linear_kernel(label)
    generator = torch.Generator(device="cuda").manual_seed(11)
    x = torch.randn(8, 4096, generator=generator, device="cuda").half()
    w = torch.randn(5120, 4096, generator=generator, device="cuda").half() * 0.02
    packed_x = kernel.pack_activation(kernel.quantize_activation(x))
    packed_w = kernel.pack_weight(kernel.quantize_weight(w))
    results = []

    for _ in range(20):
        out = torch.full((8, 5120), torch.nan, dtype=torch.float16, device="cuda")
        kernel.gemm(packed_x, packed_w, out)
        results.append(out)

    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("label", PROBES)
def test_probes_do_what_they_say_in_every_configuration(label: str) -> None:
    probe = resolve(label, "cuda")
    assert not isinstance(probe, LinearKernel)
    gemm = GemmWorkload(1, 1000, 1111)
    operand = probe.allocate(gemm, torch.device("cuda"), seed=1)

    assert all(probe.check(operand, c).exact for c in (None, *probe.candidates(gemm)))
