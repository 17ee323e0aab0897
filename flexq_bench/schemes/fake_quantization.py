"""A linear layer that computes what a quantized kernel computes, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from flexq_bench.kernels.formats import Operand
from flexq_bench.schemes.activations import ActivationQuantizer
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import replace_module
from flexq_bench.schemes.model_map import LinearSite, linear_at
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.rotation import Rotation

_LARGEST_FP16 = torch.finfo(torch.float16).max


class FakeQuantizedLinear(nn.Module):
    """Y = q(R X)[order] · W^T + bias of a quantized layer: W and q(R X) are code times scale.

    Products are summed in FP32 whatever the model's dtype, as in kernels, and Y has X's dtype.

    The layer consists of its codes, which move with it to a device. Derived from them are:
    weight: [N, K] dequantized, FP32 (FP16 would round code times scale), channels in the order of
            the codes.
    bias:   [N], FP32; None: the layer has none.
    order:  [K], int64, permutation of the channels of X (Atom); None: not permuted.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(self, name: str, layer: QuantizedLayer) -> None:
        super().__init__()
        self.name = name
        self.out_features, self.in_features = layer.weight.rows, layer.weight.k
        self._layer = layer
        order = layer.weight.order
        self.register_buffer("weight", layer.weight.dequantize(torch.float32))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.float())
        self.register_buffer("order", None if order is None else order.long())

    @property
    def layer(self) -> QuantizedLayer:
        """The codes, on the device of this module."""
        return self._layer

    @property
    def activation(self) -> ActivationQuantizer | None:
        """Quantizer of the input; None: the input is not quantized (weight-only)."""
        return self._layer.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., K] to [..., N] in x's dtype. Raises QuantizeError if x can't be quantized."""
        rows = self._layer.rotated(x.reshape(-1, self.in_features))
        if self.order is not None:
            rows = rows[:, self.order]
        try:
            rows = rows.to(torch.float32) if self.activation is None else self.activation(rows)
        except ValueError as error:
            raise QuantizeError(f"{self.name}: {past_fp16(x) or error}") from error
        y = functional.linear(rows, self.weight, self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Follow the model to a device, but not to another dtype: code times scale needs FP32."""
        device = fn(self.weight.new_empty(0)).device
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else buffer.to(device)
        self._layer = self._layer.to(device)
        return self


def quantize_site(
    model: nn.Module,
    site: LinearSite,
    weight: Operand,
    activation: ActivationQuantizer | None = None,
    *,
    rotation: Rotation | None = None,
) -> FakeQuantizedLinear:
    """Replace a site by a FakeQuantizedLinear with these codes and the site's bias as FP16.

    rotation: of its input, at run time. Raises QuantizeError if FP16 can't represent the bias, or
    weights that are not quantized.
    """
    dense = linear_at(model, site.name)
    bias = None if dense.bias is None else dense.bias.detach().to(torch.float16)
    for what, values in (("bias", bias), ("weights", weight.values)):
        is_half = values is not None and values.dtype == torch.float16
        if is_half and not bool(torch.isfinite(values).all()):
            raise QuantizeError(f"{site.name}: its {what} pass FP16's {_LARGEST_FP16:,.0f}")
    layer = QuantizedLayer(weight.to(dense.weight.device), activation, bias, rotation)
    quantized = FakeQuantizedLinear(site.name, layer)
    replace_module(model, site.name, quantized)
    return quantized


def past_fp16(x: torch.Tensor) -> str:
    """Explain why kernels can't take finite inputs beyond FP16; empty: there are none."""
    largest = float(x.abs().amax())
    if not _LARGEST_FP16 < largest < math.inf:
        return ""
    return (
        f"inputs reach {largest:.3g}, kernels take FP16 up to {_LARGEST_FP16:,.0f}: do "
        "not quantize this model"
    )
