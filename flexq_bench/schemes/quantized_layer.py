"""A quantized linear layer: produced by schemes, stored in checkpoints, run by kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexq_bench.kernels.contract import LinearKernel, PackedOperand
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand, format_of
from flexq_bench.schemes.activations import ActivationQuantizer, StaticActivation
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.rotation import Rotation


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """Y = q(R X) · W^T + bias, as codes.

    weight:     codes and scales of [N, K], or FP16 values; weight.order is the order of X's
                channels too.
    activation: rounds X; None: X is FP16 (weight-only).
    bias:       FP16 [N]; None: there is none.
    rotation:   R, of the input; None: there is none.

    Raises ShapeError if the bias is not one value a row.
    """

    weight: Operand
    activation: ActivationQuantizer | None = None
    bias: torch.Tensor | None = None
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        if self.bias is not None and tuple(self.bias.shape) != (self.weight.rows,):
            raise ShapeError(
                f"a bias of {self.weight.rows} rows has shape {tuple(self.bias.shape)}"
            )

    def to(self, device: torch.device | str) -> QuantizedLayer:
        """Return the same layer on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        rotation = None if self.rotation is None else self.rotation.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias, rotation=rotation)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """R x for each row of x [tokens, K], computed in FP32 at least; x without a rotation."""
        if self.rotation is None:
            return x
        return self.rotation.apply(x if x.dtype == torch.float64 else x.float())

    def packed_for(self, kernel: LinearKernel) -> PackedOperand:
        """Pack the weights for a kernel, with the static scale of activations if there is one.

        Raises ShapeError for scales past FP16, and as the kernel's pack_weight.
        """
        takes_halves = kernel.spec.weight.scale == "fp16"
        packed = kernel.pack_weight(self.weight.with_half_scales() if takes_halves else self.weight)
        if not isinstance(self.activation, StaticActivation):
            return packed
        scale = [self.activation.scale]
        static = torch.tensor(scale, dtype=torch.float32, device=self.weight.values.device)
        return packed.with_buffers(static=static)

    @property
    def formats(self) -> LayerFormats:
        """Formats that a kernel of this layer must support."""
        return LayerFormats(
            self.weight_format, self.activation_format, rotated=self.rotation is not None
        )

    @property
    def weight_format(self) -> NumberFormat:
        """Format of the codes."""
        return format_of(self.weight)

    @property
    def activation_format(self) -> NumberFormat | None:
        """Format to which a kernel must round X; None: no built-in kernel has such an activation.

        Only kernels of mixed codes permute X's channels into the order of the weight's.
        """
        if self.weight.order is not None and self.weight.tail_bits is None:
            return None
        if self.activation is None:
            return FP16
        return self.activation.kernel_format
