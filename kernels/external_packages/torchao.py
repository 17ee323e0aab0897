"""torchao: 4-bit weights in its tile-packed int4 layout, on PyTorch's tinygemm kernel.

torchao had FP6-LLM's kernel, with E3M2 weights, up to 0.15; it was removed in 0.16
(github.com/pytorch/ao/pull/3520), and the releases that have it load only with torch 2.9. The
remaining low-bit weight format on CUDA without another package is `Int4TilePackedTo4dTensor`: 4-bit
codes with a BF16 scale and zero point per group, multiplied by BF16 activations.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import Config, GemmCall, KernelSpec, PackedOperand
from flexq_bench.kernels.contract import checked_scales as checked
from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.half_activations import HalfActivationKernel
from flexq_bench.kernels.external_packages.packages import TORCHAO, load, store
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand

_GROUP, _OFFSET = 128, 8  # the kernel reads code c in 0 … 15 as c - 8
_INNER_TILES = 8  # of k in a packed tile, as in torchao
_N_MULTIPLE = 8
_BF16_BITS = 8


class TinyGemm(HalfActivationKernel):
    """`torchao-w4a16`."""

    dtype = torch.bfloat16
    k_multiple = 1024  # torchao pads to it
    spec = KernelSpec(
        name="torchao-w4a16",
        backend="cuda",
        weight=NumberFormat(4, _GROUP, scale="bf16"),
        activation=FP16,
        summary="torchao's tile-packed int4 weights, BF16 activations and results",
        package=TORCHAO,
        rounds_to=_BF16_BITS,
    )

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        return Operand(x.to(self.dtype).float(), None, 16, None)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked(weight, self.spec.weight)
        rows = -(-weight.rows // _N_MULTIPLE) * _N_MULTIPLE
        k = self.padded_k(weight.k)
        codes = padded(weight.values, rows, k).to(torch.int32) + _OFFSET
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
        padded_scales = padded(scales, rows, k // _GROUP)
        join = load(TORCHAO, "quantization.utils").pack_tinygemm_scales_and_zeros
        buffers = {
            "tiles": torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_TILES),
            "scales": join(padded_scales, torch.zeros_like(padded_scales)),
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, _ = call
        y = torch.ops.aten._weight_int4pack_mm(
            x.buffers["values"], w.buffers["tiles"], _GROUP, w.buffers["scales"]
        )
        store(y, bias, out)
