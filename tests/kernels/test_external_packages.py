"""Kernels of external packages: errors if these are missing, and calls of stand-ins."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.errors import ShapeError, UnsupportedError
from flexq_bench.kernels.external_packages import packages
from flexq_bench.kernels.external_packages.packages import BITSANDBYTES, HUMMING, TORCHAO
from flexq_bench.kernels.formats import (
    FLOAT_TYPES,
    NumberFormat,
    Operand,
    quantize,
    quantize_symmetric,
)
from flexq_bench.kernels.reference import Reference, reference_gemm
from flexq_bench.kernels.registry import labels, resolve
from flexq_bench.measure.check import judge_error
from flexq_bench.measure.inputs import realistic_inputs
from flexq_bench.workloads.gemm import GemmWorkload

EXTERNAL = [
    label
    for label in labels("cuda")
    if resolve(label, "cuda").spec.package and isinstance(resolve(label, "cuda"), LinearKernel)
]
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def _modules_are_looked_for_anew():
    packages.load.cache_clear()
    yield
    packages.load.cache_clear()


def install(monkeypatch, package, version, **modules):
    """A package that is only as large as what we call of it."""
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: version if name == package.name else real(name)
    )
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


def test_nine_kernels_of_three_packages_are_registered():
    assert len(EXTERNAL) == 9
    assert {resolve(label, "cuda").spec.package for label in EXTERNAL} == set(packages.PACKAGES)


def test_missing_package_is_named_with_command(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UnsupportedError, match=r"torchao is not installed: .*\[peers\]"):
        resolve("torchao-w4a16", "cuda").spec.check_capability(HOPPER)


def test_unsupported_package_version_is_refused(monkeypatch):
    install(monkeypatch, BITSANDBYTES, "0.41.0")
    with pytest.raises(UnsupportedError, match=r"bitsandbytes 0\.41\.0 is not supported"):
        resolve("bitsandbytes-int8", "cuda").spec.check_capability(HOPPER)


def test_a_package_that_breaks_on_import_says_why(monkeypatch):
    install(monkeypatch, HUMMING, "0.1.19")

    def broken(name):
        raise OSError("libcudart.so.14: no such file")

    monkeypatch.setattr(packages.importlib, "import_module", broken)
    with pytest.raises(UnsupportedError, match=r"can't be imported \(OSError: libcudart"):
        packages.load(HUMMING, "ops")


def test_other_kernels_need_no_package():
    resolve("w4a16", "cuda").spec.check_capability(HOPPER)


def test_results_of_few_bits_are_judged_by_these_bits():
    exact = Reference(torch.tensor([[1.0]]), torch.tensor([[1.0]]))
    off_by_a_bf16_rounding = torch.tensor([[1.0 + 2.0**-9]])
    assert not judge_error(off_by_a_bf16_rounding, exact, 1e-3).is_correct
    assert judge_error(off_by_a_bf16_rounding, exact.rounded_to(8), 1e-3).is_correct
    assert not judge_error(off_by_a_bf16_rounding * 1.01, exact.rounded_to(8), 1e-3).is_correct
    assert exact.rounded_to(None) is exact


def test_int8_is_called_with_largest_magnitudes(monkeypatch):
    """A stand-in that computes what the package documents."""

    def dequantize(sums, rows, columns, bias=None):
        y = sums.double() * rows.double()[:, None] * columns.double() / 127**2
        return (y if bias is None else y + bias.double()).half()

    def quantize(x):
        largest = x.float().abs().amax(dim=1)
        return torch.round(x.float() * (127 / largest[:, None])).to(torch.int8), largest, None

    functional = {
        "int8_linear_matmul": lambda a, b: a.int() @ b.int().T,
        "int8_mm_dequant": dequantize,
        "int8_vectorwise_quant": quantize,
    }
    install(
        monkeypatch, BITSANDBYTES, "0.50.2", bitsandbytes={}, bitsandbytes__functional=functional
    )
    kernel, gemm = resolve("bitsandbytes-int8", "cuda"), GemmWorkload(3, 40, 256)
    inputs = realistic_inputs(kernel, gemm, torch.device("cpu"), 1)
    out = torch.full((3, 40), torch.nan, dtype=torch.float16)

    empty = kernel.empty_activation(3, 256, torch.device("cpu"))
    bias = torch.randn(40).half()
    y = kernel.linear(inputs.x_real, empty, kernel.pack_weight(inputs.w), out, bias=bias)

    reference = reference_gemm(inputs.x, inputs.w, bias).rounded_to(kernel.spec.rounds_to)
    assert judge_error(y, reference, 1e-3).is_correct


def tinygemm(x, tiles, group, scales):
    """What PyTorch's kernel computes from what torchao packs: scales [K/group, N, 2]."""
    codes = torch.stack([tiles >> 4, tiles & 15], dim=2).flatten(1).float() - 8
    wide = scales.float().repeat_interleave(group, dim=0)
    weights = codes * wide[..., 0].T + wide[..., 1].T
    return (x.float() @ weights.T).bfloat16()


def test_torchao_gets_nibbles_pairs_of_scales_and_padding(monkeypatch):
    def join(scales, zeros):
        return torch.stack([scales, zeros], dim=2).transpose(0, 1).contiguous()

    utils = {"pack_tinygemm_scales_and_zeros": join}
    install(monkeypatch, TORCHAO, "0.18.0", torchao={}, torchao__quantization__utils=utils)
    calls = SimpleNamespace(
        _convert_weight_to_int4pack=lambda pairs, inner: pairs, _weight_int4pack_mm=tinygemm
    )
    monkeypatch.setattr(torch.ops, "aten", calls)
    kernel, gemm = resolve("torchao-w4a16", "cuda"), GemmWorkload(3, 37, 1100)
    generator = torch.Generator().manual_seed(2)
    x = kernel.quantize_activation(torch.randn(3, 1100, generator=generator).half())
    w = kernel.quantize_weight(torch.randn(37, 1100, generator=generator))
    out = torch.full((3, 37), torch.nan, dtype=torch.bfloat16)

    y = kernel.gemm(kernel.pack_activation(x), kernel.pack_weight(w), out)

    monkeypatch.undo()
    assert gemm.n == y.shape[1]
    reference = reference_gemm(x, w).rounded_to(kernel.spec.rounds_to)
    assert judge_error(y, reference, 1e-3).is_correct


class _Layer(torch.nn.Module):
    """What we use of HummingLayer, packing nothing."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.humming_config = None
        self.locks = torch.zeros(4, dtype=torch.int32)

    def load_from_tensors(self, tensors):
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))

    def transform(self):
        self.humming_config = self.options


def _forward(layout, *, inputs, outputs, weight, weight_scale, locks, input_scale=None, **others):
    dtype = layout["weight_config"]["dtype"]
    if dtype == "float4e0m3":
        values = (weight & 7) * (1 - 2 * (weight >> 3))
    elif dtype.startswith("int"):
        values = weight - 2 ** (int(dtype[3:]) - 1)
    else:
        values = FLOAT_TYPES[dtype.removeprefix("float6")].numbers()[weight.long()]
    scales = weight_scale.double().repeat_interleave(layout["shape_k"] // weight_scale.shape[1], 1)
    x = inputs.double() if input_scale is None else inputs.double() * input_scale
    outputs.copy_(x @ (values * scales).T)


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("humming-w4a16", lambda w: quantize_symmetric(w, 4, 128, top=7)),
        ("humming-fp6", lambda w: quantize(w, NumberFormat(6, kind="float"))),
        ("humming-w6a8", lambda w: quantize_symmetric(w, 6, 128)),
        ("humming-w6a8-row", lambda w: quantize(w, NumberFormat.parse("int6/row"))),
        ("humming-w4a8", lambda w: quantize_symmetric(w, 4, 128)),
        ("humming-fp6a8", lambda w: quantize(w, NumberFormat.parse("fp6-e2m3/row"))),
    ],
)
def test_humming_gets_the_codes_that_its_types_mean(monkeypatch, name, quantize):
    install(
        monkeypatch,
        HUMMING,
        "0.1.19",
        humming={},
        humming__layer={"HummingLayer": _Layer},
        humming__ops={"pack_weight": lambda codes, bits: codes},
        humming__forward={"humming_forward": _forward},
    )
    kernel = resolve(name, "cuda")
    generator = torch.Generator().manual_seed(3)
    w = kernel.quantize_weight(torch.randn(64, 256, generator=generator).half())
    assert torch.equal(
        w.values, quantize(torch.randn(64, 256, generator=generator.manual_seed(3)).half()).values
    )
    x = kernel.quantize_activation(torch.randn(2, 256, generator=generator).half())
    out = torch.full((2, 64), torch.nan, dtype=torch.float16)

    kernel.gemm(kernel.pack_activation(x), kernel.pack_weight(w), out)

    assert judge_error(out, reference_gemm(x, w), 1e-3).is_correct


def test_humming_refuses_padding_and_code_minus_eight(monkeypatch):
    kernel = resolve("humming-w4a16", "cuda")
    with pytest.raises(UnsupportedError, match="multiples of 64"):
        kernel.pack_weight(quantize_symmetric(torch.ones(40, 128), 4))
    install(monkeypatch, HUMMING, "0.1.19", humming={}, humming__layer={"HummingLayer": _Layer})
    codes = torch.full((64, 128), -8, dtype=torch.int8)
    with pytest.raises(ShapeError, match="within ±7"):
        kernel.pack_weight(Operand(codes, torch.ones(64, 1).half(), 4, 128))
