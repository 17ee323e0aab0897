"""Layers that read one input as one: q, k and v; gate and up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.errors import UsageError
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.scheme import Scheme
from kernels.formats import Operand


class UnlikePartsError(UsageError):
    """Layers are quantized so that decode's forward pass can't run them.

    Those that read one input so differently that no kernel runs them as one, or any so that its
    input is rotated before."""


def fused(parts: Sequence[tuple[str, QuantizedLayer]]) -> QuantizedLayer:
    """The rows of all parts, each with its name, below each other. Codes stay what they are.

    A part without a bias has zeros where another has one. Raises UnlikePartsError if parts differ
    in format or in the order of their channels: one kernel reads one input.
    """
    layers = [layer for _, layer in parts]
    if len(layers) == 1:
        return layers[0]
    first = layers[0]
    for name, layer in parts[1:]:
        if layer.formats != first.formats:
            raise UnlikePartsError(
                f"{parts[0][0]} is {first.formats.name} and {name} is {layer.formats.name}: "
                "decode runs them as one layer, so quantize them alike"
            )
        if layer.activation != first.activation or not _same_order(layer.weight, first.weight):
            raise UnlikePartsError(
                f"{parts[0][0]} and {name} round or order their common input differently: decode "
                "runs them as one layer, so quantize them alike"
            )
    bias = None
    if any(layer.bias is not None for layer in layers):
        bias = torch.cat([_bias(layer) for layer in layers])
    return QuantizedLayer(
        Operand.stacked([layer.weight for layer in layers]), first.activation, bias, first.rotation
    )


def fused_formats(scheme: Scheme, kinds: Sequence[str], *, gated: bool) -> LayerFormats:
    """The formats of the fused layer of these kinds under a scheme, before it is quantized.

    Raises UsageError if it rounds them differently.
    """
    formats = {kind: scheme.layer_formats(kind, gated) for kind in kinds}
    first, *others = formats.items()
    for kind, other in others:
        if other != first[1]:
            raise UsageError(
                f"{scheme.name} rounds {first[0]} to {first[1].name} and {kind} to {other.name}: "
                "decode runs them as one layer; pick another scheme"
            )
    return first[1]


def _same_order(one: Operand, other: Operand) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _bias(layer: QuantizedLayer) -> torch.Tensor:
    if layer.bias is not None:
        return layer.bias
    return torch.zeros(layer.weight.rows, dtype=torch.float16, device=layer.weight.values.device)
