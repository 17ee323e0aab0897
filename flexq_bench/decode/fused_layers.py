"""Fusion of layers with the same input: q, k and v; gate and up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.errors import UsageError
from flexq_bench.kernels.formats import Operand
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.scheme import Scheme


class UnlikePartsError(UsageError):
    """The quantization of some layers is not supported by decode's forward pass.

    Layers to be fused differ in format or channel order, or have blocks of rows that their seams
    cut, or an input must be rotated.
    """


def fused(parts: Sequence[tuple[str, QuantizedLayer]]) -> QuantizedLayer:
    """Stack the rows of all parts, given with their names, without changing codes.

    If only some parts have a bias, the others get zeros. Raises UnlikePartsError if parts differ in
    format or channel order, as one kernel reads their common input, or if blocks of rows are cut.
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
    tall = first.weight.block_rows or 1
    for name, layer in parts[:-1]:
        if layer.weight.rows % tall:
            raise UnlikePartsError(
                f"{name} has {layer.weight.rows} rows in blocks of {tall}: decode runs it and "
                f"{parts[-1][0]} as one layer, whose blocks would be cut"
            )
    bias = None
    if any(layer.bias is not None for layer in layers):
        bias = torch.cat([_bias(layer) for layer in layers])
    return QuantizedLayer(
        Operand.stacked([layer.weight for layer in layers]), first.activation, bias, first.rotation
    )


def fused_formats(scheme: Scheme, kinds: Sequence[str], *, gated: bool) -> LayerFormats:
    """The formats of the fused layer of these kinds under a scheme.

    Raises UsageError if their formats differ.
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


def _same_order(first: Operand, second: Operand) -> bool:
    if first.order is None or second.order is None:
        return first.order is second.order
    return torch.equal(first.order, second.order)


def _bias(layer: QuantizedLayer) -> torch.Tensor:
    if layer.bias is not None:
        return layer.bias
    return torch.zeros(layer.weight.rows, dtype=torch.float16, device=layer.weight.values.device)
