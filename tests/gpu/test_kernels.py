"""Every CUDA kernel, in every configuration, against references that share nothing with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import operands
import pytest
import torch

from flexq_bench.kernels.contract import Config, LinearKernel, Probe
from flexq_bench.kernels.cuda.cublas.cublaslt import LtTypes, lt_candidates
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.reference import reference_gemm
from flexq_bench.kernels.registry import labels, resolve
from flexq_bench.workloads.gemm import GemmWorkload

Choose = Callable[[Sequence[Any]], Sequence[Any]]


def has_exact_sums(label: str) -> bool:
    """Whether sums of codes times small integers stay exact: not those of FP8 and FP16 weights, nor
    of FP8 tensor cores."""
    spec = resolve(label, "cuda").spec
    has_floats = spec.weight.kind == spec.activation.kind == "float"
    return spec.weight.is_integer or (spec.weight.bits < 8 and not has_floats)


EVERY_LINEAR = [
    label for label in labels("cuda") if isinstance(resolve(label, "cuda"), LinearKernel)
]
# Outside packages have tests of their own: test_external_packages.py.
ALL_LINEAR = [label for label in EVERY_LINEAR if resolve(label, "cuda").spec.package is None]
ABQ = [label for label in ALL_LINEAR if label.startswith("abq-")]
# 49 widths of one source: these stand for all of them where there are many shapes.
ABQ_CHOSEN = {"abq-w2a2", "abq-w2a8", "abq-w3a5", "abq-w6a6", "abq-w6a8", "abq-w7a3", "abq-w8a8"}
LINEAR = [
    label
    for label in ALL_LINEAR
    if label not in ABQ or label in ABQ_CHOSEN or resolve(label, "cuda").spec.variant
]
CODED_WEIGHTS = [label for label in LINEAR if has_exact_sums(label)]
PROBES = [label for label in labels("cuda") if isinstance(resolve(label, "cuda"), Probe)]
SHAPES = [
    *product((1, 2, 3, 8, 9, 16, 17), (100, 4096), (64, 576)),
    *product((1, 5, 33), (1, 8), (1, 4096)),
    (1, 12288, 4096),
    (8, 4096, 11008),
    (64, 300, 1111),
    (40, 4096, 1000),
    (129, 264, 576),
]


def linear_kernel(label: str) -> LinearKernel:
    kernel = resolve(label, "cuda")
    assert isinstance(kernel, LinearKernel)
    try:
        kernel.spec.check_capability(torch.cuda.get_device_capability())
    except UnsupportedError as error:
        pytest.skip(str(error))
    return kernel


def configs_of(kernel: LinearKernel, gemm: GemmWorkload) -> Sequence[Config | None]:
    return [None, *kernel.candidates(gemm)]


def multiply(
    kernel: LinearKernel, x: Operand, w: Operand, config: Config | None = None
) -> torch.Tensor:
    out = torch.full((x.rows, w.rows), torch.nan, dtype=torch.float16, device="cuda")
    packed_x, packed_w = kernel.pack_activation(x.to("cuda")), kernel.pack_weight(w.to("cuda"))
    try:
        kernel.gemm(packed_x, packed_w, out, config=config)
    except UnsupportedError as error:  # a library's answer to a shape; our own kernels take all
        if not kernel.spec.name.startswith("cublas"):
            raise
        pytest.skip(str(error))
    return out.cpu()


def coded_operands(
    kernel: LinearKernel, m: int, n: int, k: int, x_scale: float
) -> tuple[Operand, Operand]:
    """Codes with powers of two as scales; FP16 activations are integers times one."""
    a, b = kernel.spec.activation, kernel.spec.weight
    w = operands.random_weight(b, n, k, seed=m + n * k)
    if a.kind == "mixed":
        return operands.random_mixed(m, k, seed=m * n + k, scale=x_scale), w
    # FP8 has all integers of 4 bits.
    x_bits = 4 if a.kind == "float" else min(a.bits, 8)
    x_codes = operands.random_codes(m, k, x_bits, seed=m * n + k)
    if a.is_dense:
        return Operand((x_codes * x_scale).half(), None, a.bits, None), w
    x = operands.unit_operand(x_codes, a.bits, a.group, x_scale)
    if a.kind == "float":
        x = replace(x, values=x_codes.to(a.float_type.dtype), element=a.element)
    return replace(x, block_rows=a.block_rows), w


def exact_product(x: Operand, w: Operand) -> torch.Tensor:
    return (x.to("cuda").dequantize() @ w.to("cuda").dequantize().T).cpu().half()


def relative_error(
    out: torch.Tensor, x: Operand, w: Operand, rounds_to: int | None = None
) -> float:
    reference = reference_gemm(x.to("cuda"), w.to("cuda")).rounded_to(rounds_to)
    out = out.to("cuda")
    cancellation = 2.0 ** (14 - reference.sum_bits)
    scale = torch.maximum(reference.y.abs(), reference.magnitude * cancellation).clamp(min=2.0**-14)
    error = (out.double() - reference.y).abs() / scale
    fits = reference.y.abs() < 65504
    return float(torch.where(fits, error, 0.0).nan_to_num(nan=torch.inf).max())


@pytest.mark.parametrize("label", CODED_WEIGHTS)
def test_integer_sums_are_exact(label: str, choose: Choose) -> None:
    kernel = linear_kernel(label)
    wrong = []
    for shape in choose(SHAPES):
        x, w = coded_operands(kernel, *shape, 2.0**-10)
        with suppress(pytest.skip.Exception):  # a library has no kernel of this shape
            if not torch.equal(multiply(kernel, x, w), exact_product(x, w)):
                wrong.append(shape)

    assert wrong == []


@pytest.mark.parametrize("label", ABQ)
def test_every_pair_of_widths_is_exact(label: str) -> None:
    kernel = linear_kernel(label)
    x, w = coded_operands(kernel, 11, 40, 700, 2.0**-10)

    out = multiply(kernel, x, w)

    assert torch.equal(out, exact_product(x, w))


@pytest.mark.parametrize("label", CODED_WEIGHTS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 100, 300), (4, 1000, 1111), (16, 72, 4096), (31, 72, 640), (48, 72, 640), (300, 264, 576)],
)
def test_every_configuration_is_exact(label: str, m: int, n: int, k: int, choose: Choose) -> None:
    kernel = linear_kernel(label)
    x, w = coded_operands(kernel, m, n, k, 2.0**-10)
    expected = exact_product(x, w)

    wrong = [
        config
        for config in choose(configs_of(kernel, GemmWorkload(m, n, k)))
        if not torch.equal(multiply(kernel, x, w, config), expected)
    ]

    assert wrong == []


@pytest.mark.parametrize("label", CODED_WEIGHTS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (8, 300, 576), (17, 100, 64), (3, 8, 1)]
)
def test_scales_over_eight_decades_keep_error_below_0_001(
    label: str, m: int, n: int, k: int
) -> None:
    kernel = linear_kernel(label)
    x, w = coded_operands(kernel, m, n, k, 1.0)
    if x.scales is not None:
        x = operands.rescaled(x, seed=1)
    w = operands.rescaled(w, seed=2)

    assert relative_error(multiply(kernel, x, w), x, w, kernel.spec.rounds_to) <= 1e-3


@pytest.mark.parametrize(
    "label",
    [label for label in CODED_WEIGHTS if resolve(label, "cuda").spec.weight.kind == "float"],
)
def test_every_minifloat_counts_for_its_number(label: str) -> None:
    kernel = linear_kernel(label)
    weight = kernel.spec.weight
    numbers = weight.float_type.numbers()
    codes = len(numbers)
    rolled = torch.stack([numbers.roll(i) for i in range(codes)])  # each code at each k and row
    w = operands.float_operand(weight, rolled)
    eye = torch.eye(codes)
    if kernel.spec.activation.is_dense:
        x = Operand(eye.half(), None, 16, None)
    else:
        x = operands.unit_operand(eye.to(torch.int8), 8, None)

    assert torch.equal(multiply(kernel, x, w).double(), rolled.T)


@pytest.mark.parametrize("label", LINEAR)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 4096, 4096), (5, 100, 300), (16, 4096, 1024), (33, 128, 1024), (70, 100, 300)],
)
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
    assert relative_error(out.cpu(), quantized, weight, kernel.spec.rounds_to) <= 1e-3


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


@pytest.mark.parametrize("label", LINEAR)
def test_overlapping_launches_read_the_previous_output(label: str) -> None:
    kernel = linear_kernel(label)
    m, n, k = 8, 512, 2048
    w = kernel.pack_weight(kernel.quantize_weight(torch.randn(n, k).cuda() * 0.02))
    inputs = [torch.randn(m, k, generator=torch.Generator().manual_seed(i)).half() for i in (1, 2)]
    x = [matrix.cuda() for matrix in inputs]
    packed = kernel.empty_activation(m, k, x[0].device)
    alone = []
    for matrix in x:
        alone.append(torch.empty(m, n, dtype=torch.float16, device="cuda"))
        kernel.linear(matrix, packed, w, alone[-1])
        torch.cuda.synchronize()

    outs = [torch.empty_like(alone[0]) for _ in range(40)]
    for i, out in enumerate(outs):
        kernel.linear(x[i % 2], packed, w, out)

    assert [i for i, out in enumerate(outs) if not torch.equal(out, alone[i % 2])] == []


@pytest.mark.parametrize("label", ["flexq", "flexq[w6a8]"])
def test_narrowed_weights_give_the_same_bits(label: str) -> None:
    kernel = linear_kernel(label)
    shape = GemmWorkload(4, 256, 1024)
    x, w = coded_operands(kernel, shape.m, shape.n, shape.k, 2.0**-10)
    packed_x, packed_w = kernel.pack_activation(x.to("cuda")), kernel.pack_weight(w.to("cuda"))

    for config in configs_of(kernel, shape):
        narrowed = kernel.narrow(packed_w, config)
        outs = [torch.empty(4, 256, dtype=torch.float16, device="cuda") for _ in range(2)]
        kernel.gemm(packed_x, packed_w, outs[0], config=config)
        kernel.gemm(packed_x, narrowed, outs[1], config=config)
        assert torch.equal(*outs)
        assert narrowed.nbytes < packed_w.nbytes


@pytest.mark.parametrize("label", PROBES)
def test_probes_are_correct_in_every_configuration(label: str) -> None:
    probe = resolve(label, "cuda")
    assert not isinstance(probe, LinearKernel)
    gemm = GemmWorkload(1, 1000, 1111)
    operand = probe.allocate(gemm, torch.device("cuda"), seed=1)

    assert all(probe.check(operand, c).exact for c in (None, *probe.candidates(gemm)))


@pytest.mark.parametrize("output", [torch.float16, torch.float32])
def test_library_has_no_int8_gemm_with_scales(output: torch.dtype) -> None:
    # If it ever has one, cublaslt-w8a8 must time it: see kernels/cuda/cublas/dense.py.
    types = LtTypes(torch.int8, output)

    assert lt_candidates(GemmWorkload(16, 4096, 4096), 4096, types) == []
