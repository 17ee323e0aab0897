"""bitsandbytes: W8A8 as LLM.int8() does it, and NF4 weights with FP16 activations.

`bitsandbytes-int8` is LLM.int8() (arXiv 2208.07339) without outlier decomposition (threshold 0):
one scale per token and one per output feature, cuBLASLt's int8 GEMM as the library calls it, and
the library's scaling kernel. `bitsandbytes-nf4` is 4-bit NormalFloat in blocks of 64 (QLoRA, arXiv
2305.14314) with FP32 scales. The library chooses between its fused kernel and a dequantization
followed by a dense GEMM.
"""

from __future__ import annotations

from types import ModuleType

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.cuda.half_activations import HalfActivationKernel
from flexq_bench.kernels.external_packages.packages import BITSANDBYTES, load, store
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand

_LARGEST = 127.0  # bitsandbytes stores largest magnitudes, 127 times our scales
_BLOCK = 64  # of NF4 codes that share a scale
_TYPE = "nf4"
_FP16_BITS = 11


def _functional() -> ModuleType:
    return load(BITSANDBYTES, "functional")


class Int8Gemm(CheckedGemm):
    """`bitsandbytes-int8`."""

    spec = KernelSpec(
        name="bitsandbytes-int8",
        backend="cuda",
        weight=NumberFormat(8),
        activation=NumberFormat(8),
        summary="LLM.int8() of bitsandbytes, without outlier decomposition",
        package=BITSANDBYTES,
        rounds_to=_FP16_BITS,  # 1/127² is a rounded constant in it
    )

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        codes, largest, _ = _functional().int8_vectorwise_quant(x)
        return Operand(codes, largest[:, None] / _LARGEST, 8, None)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        return _with_largest(weight, self.spec.weight)

    def pack_activation(self, x: Operand) -> PackedOperand:
        return _with_largest(x, self.spec.activation)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        buffers = {
            "codes": torch.zeros(m, k, dtype=torch.int8, device=device),
            "largest": torch.zeros(m, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        codes, largest, _ = _functional().int8_vectorwise_quant(x)
        packed.buffers["codes"].copy_(codes)
        packed.buffers["largest"].copy_(largest)

    def activated(self, x: torch.Tensor, packed: PackedOperand) -> PackedOperand:
        """Return the tensors of the quantizer, without copying them."""
        codes, largest, _ = _functional().int8_vectorwise_quant(x)
        return PackedOperand({"codes": codes, "largest": largest}, packed.rows, packed.k)

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, _ = call
        functional = _functional()
        sums = functional.int8_linear_matmul(x.buffers["codes"], w.buffers["codes"])
        largest = x.buffers["largest"], w.buffers["largest"]
        store(functional.int8_mm_dequant(sums, *largest, bias=bias), None, out)


def _with_largest(operand: Operand, fmt: NumberFormat) -> PackedOperand:
    scales = checked_scales(operand, fmt)
    buffers = {"codes": operand.values, "largest": (scales[:, 0].double() * _LARGEST).float()}
    return PackedOperand(buffers, operand.rows, operand.k)


class NormalFloatGemm(HalfActivationKernel):
    """`bitsandbytes-nf4`. Operands have dequantized FP16 values."""

    spec = KernelSpec(
        name="bitsandbytes-nf4",
        backend="cuda",
        weight=NumberFormat(4, _BLOCK, kind="normal"),
        activation=FP16,
        summary="NF4 of bitsandbytes, FP32 scales of blocks, FP16 activations",
        package=BITSANDBYTES,
        rounds_to=_FP16_BITS,
    )

    def quantize_weight(self, weight: torch.Tensor) -> Operand:
        functional = _functional()
        codes, state = functional.quantize_4bit(weight.half(), blocksize=_BLOCK, quant_type=_TYPE)
        return Operand(functional.dequantize_4bit(codes, state), None, 16, None)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        """Quantize again, which is exact: the largest value of a block has code 1 or -1."""
        values = weight.values.half().contiguous()
        codes, state = _functional().quantize_4bit(values, blocksize=_BLOCK, quant_type=_TYPE)
        buffers = {"codes": codes, "largest": state.absmax, "table": state.code}
        return PackedOperand(buffers, weight.rows, weight.k)

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, _ = call
        functional, b = _functional(), w.buffers
        state = functional.QuantState(
            absmax=b["largest"],
            shape=torch.Size((w.rows, w.k)),
            code=b["table"],
            blocksize=_BLOCK,
            quant_type=_TYPE,
            dtype=torch.float16,
        )
        multiply = load(BITSANDBYTES).matmul_4bit
        store(multiply(x.buffers["values"], b["codes"], state, bias=bias), None, out)
