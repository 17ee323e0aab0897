"""A linear layer that computes what a quantized kernel computes, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from flexq_bench.schemes.activations import ActivationQuantizer
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_map import LinearSite, linear_at, replace_module
from kernels.errors import ShapeError

_LARGEST_INPUT = torch.finfo(torch.float16).max


class FakeQuantizedLinear(nn.Module):
    """Y = q(s · X)[order] · W^T + bias, W and q(X) code times scale.

    Products are summed in FP32 whatever the model's dtype, as kernels do, and Y has X's dtype.

    weight:      dequantized [N, K], kept in FP32 (FP16 would round code times scale), its channels
                 in the order that `order` puts the input in.
    bias:        [N]; None: the layer has none.
    activation:  rounds the input; None: it stays as it is (weight-only).
    input_scale: [K], what channels of X are multiplied with before all else (where it can't be
                 folded into what comes before); None: nothing.
    order:       [K], int64: which channel of X stands where (Atom); None: as they are.
    output:      rounds Y (Atom's KV cache: groups of a head's size).

    Raises ShapeError if these don't fit each other.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        name: str,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: ActivationQuantizer | None = None,
        *,
        input_scale: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        output: ActivationQuantizer | None = None,
    ) -> None:
        super().__init__()
        n, k = weight.shape
        for what, tensor, length in (
            ("bias", bias, n),
            ("input_scale", input_scale, k),
            ("order", order, k),
        ):
            if tensor is not None and tuple(tensor.shape) != (length,):
                raise ShapeError(f"{name}: {what} must be [{length}], got {list(tensor.shape)}")
        self.name = name
        self.out_features, self.in_features = n, k
        self.activation = activation
        self.output = output
        self.register_buffer("weight", weight.detach().to(torch.float32))
        self.register_buffer("bias", _float(bias))
        self.register_buffer("input_scale", _float(input_scale))
        self.register_buffer("order", order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype. Raises QuantizeError if x can't be quantized."""
        rows = x.reshape(-1, self.in_features)
        if self.input_scale is not None:
            rows = rows * self.input_scale.to(rows.dtype)
        if self.order is not None:
            rows = rows[:, self.order]
        try:
            rows = rows.to(torch.float32) if self.activation is None else self.activation(rows)
            y = functional.linear(rows, self.weight, self.bias).to(x.dtype)
            if self.output is not None:
                y = self.output(y).to(x.dtype)
        except ValueError as error:
            largest = float(x.abs().amax())
            if _LARGEST_INPUT < largest < math.inf:
                reason = (
                    f"inputs reach {largest:.3g}, kernels take FP16 up to {_LARGEST_INPUT:,.0f}"
                )
                raise QuantizeError(f"{self.name}: {reason}: leave this model as it is") from error
            raise QuantizeError(f"{self.name}: {error}") from error
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Follow the model to a device, but not to another dtype: code times scale needs FP32."""
        device = fn(self.weight.new_empty(0)).device
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else buffer.to(device)
        return self


def quantize_site(
    model: nn.Module,
    site: LinearSite,
    weight: torch.Tensor,
    activation: ActivationQuantizer | None = None,
    *,
    input_scale: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    output: ActivationQuantizer | None = None,
) -> FakeQuantizedLinear:
    """Put a FakeQuantizedLinear with this dequantized weight and the site's bias where it is."""
    dense = linear_at(model, site.name)
    quantized = FakeQuantizedLinear(
        site.name,
        weight.to(dense.weight.device),
        dense.bias,
        activation,
        input_scale=input_scale,
        order=order,
        output=output,
    )
    replace_module(model, site.name, quantized)
    return quantized


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32)
