"""Humming: the successor of vLLM's Marlin kernels, a package that compiles at run time.

It supports low-bit integer and float weights with FP16 activations. `humming-w4a16` has Marlin's
format (symmetric 4-bit codes, an FP16 scale per 128 of k), `humming-fp6` has E3M2 weights with a
scale per row, as FP6-LLM. The package chooses its own configuration for a shape.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.kernels.contract import Config, GemmCall, KernelSpec, PackedOperand, checked_scales
from flexq_bench.kernels.cuda.half_activations import HalfActivationKernel
from flexq_bench.kernels.errors import ShapeError, UnsupportedError
from flexq_bench.kernels.external_packages.packages import HUMMING, load
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand, quantize_symmetric

_GROUP = 128
_N_MULTIPLE, _K_MULTIPLE = 64, 128
_FP16_BITS = 11
_TOP = 7  # of symmetric 4-bit codes: without -8 they are sign and magnitude
_DTYPES = {4: "float4e0m3", 6: "float6e3m2"}  # by bits; e0m3 is a sign and a magnitude


class HummingGemm(HalfActivationKernel):
    """`humming-w4a16` and `humming-fp6`."""

    def __init__(self, name: str, weight: NumberFormat, description: str) -> None:
        self.spec = KernelSpec(
            name=name,
            backend="cuda",
            weight=weight,
            activation=FP16,
            summary=f"{description} of humming-kernels, which follow Marlin",
            package=HUMMING,
            rounds_to=_FP16_BITS,
        )
        self._layouts: dict[tuple[int, int], Any] = {}  # the package's, by N and K

    def quantize_weight(self, weight: torch.Tensor) -> Operand:
        fmt = self.spec.weight
        if fmt.kind == "float":
            return super().quantize_weight(weight)
        return quantize_symmetric(weight, fmt.bits, fmt.group, top=_TOP)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        """Pack the weights. Raises UnsupportedError for shapes that the package would pad."""
        scales = checked_scales(weight, self.spec.weight)
        n, k, bits = weight.rows, weight.k, self.spec.weight.bits
        if n % _N_MULTIPLE or k % _K_MULTIPLE:
            raise UnsupportedError(
                f"{self.spec.label} takes N in multiples of {_N_MULTIPLE} and K of {_K_MULTIPLE}, "
                f"got {n}x{k}"
            )
        codes = self._codes(weight.values)
        layer = (
            load(HUMMING, "layer")
            .HummingLayer(
                shape_n=n,
                shape_k=k,
                weight_config={"dtype": _DTYPES[bits], "group_size": self.spec.weight.group or 0},
                torch_dtype=torch.float16,
            )
            .to(weight.values.device)
        )
        packed = load(HUMMING, "ops").pack_weight(codes, bits)
        layer.load_from_tensors({"weight": packed, "weight_scale": scales.half()})
        layer.transform()
        self._layouts[n, k] = layer.humming_config
        buffers = {
            "weight": layer.weight.data,
            "weight_scale": layer.weight_scale.data,
            "locks": layer.locks,
        }
        return PackedOperand(buffers, n, k)

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, _ = call
        forward = load(HUMMING, "forward").humming_forward
        layout = self._layouts[w.rows, w.k]
        forward(layout, inputs=x.buffers["values"], outputs=out, **w.buffers)
        if bias is not None:
            out += bias

    def _codes(self, values: torch.Tensor) -> torch.Tensor:
        """Return codes int32 [N,K] in the package's encoding."""
        if self.spec.weight.kind == "float":
            return self.spec.weight.float_type.codes(values).to(torch.int32).contiguous()
        if int(values.min()) < -_TOP:
            raise ShapeError(f"codes lie within ±{_TOP} here, got {int(values.min())}")
        wide = values.to(torch.int32)
        return wide.abs() | (wide < 0).to(torch.int32) << 3
