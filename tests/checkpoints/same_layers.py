"""Comparison of quantized layers, bit for bit."""

from __future__ import annotations

import torch

from flexq_bench.schemes.quantized_layer import QuantizedLayer


def same_tensor(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Equal in type, shape and bits: -0 is not 0."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return _bytes(one) == _bytes(other)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def same_layer(one: QuantizedLayer, other: QuantizedLayer) -> bool:
    tensors = ("values", "scales", "zero_points", "row_scales", "order")
    return (
        all(same_tensor(getattr(one.weight, n), getattr(other.weight, n)) for n in tensors)
        and (one.weight.bits, one.weight.group, one.weight.tail_bits)
        == (other.weight.bits, other.weight.group, other.weight.tail_bits)
        and one.activation == other.activation
        and same_tensor(one.bias, other.bias)
        and same_tensor(_rotation(one), _rotation(other))
    )


def _rotation(layer: QuantizedLayer) -> torch.Tensor | None:
    return None if layer.rotation is None else layer.rotation.apply(torch.eye(layer.weight.k))
