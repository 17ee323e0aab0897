"""Comparison of quantized layers, bit for bit."""

from __future__ import annotations

import torch


def same_tensor(first, second):
    """Equal in type, shape and bits: -0 is not 0."""
    if first is None or second is None:
        return first is second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return _bytes(first) == _bytes(second)


def _bytes(tensor):
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def same_layer(first, second):
    tensors = ("values", "scales", "zero_points", "row_scales", "order")
    return (
        all(same_tensor(getattr(first.weight, n), getattr(second.weight, n)) for n in tensors)
        and (first.weight.bits, first.weight.group, first.weight.tail_bits)
        == (second.weight.bits, second.weight.group, second.weight.tail_bits)
        and first.activation == second.activation
        and same_tensor(first.bias, second.bias)
        and same_tensor(_rotation(first), _rotation(second))
    )


def _rotation(layer):
    return None if layer.rotation is None else layer.rotation.apply(torch.eye(layer.weight.k))
