"""FP16 weights rounded to nearest in the formats of a scheme, without calibration."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexq_bench.decode.architecture import DecoderArchitecture
from flexq_bench.decode.fused_layers import fused_formats
from flexq_bench.decode.loading import label_of
from flexq_bench.decode.weights import (
    BlockWeights,
    DenseWeights,
    Ends,
    WeightSource,
    layer_sizes,
    parts_of,
)
from flexq_bench.kernels.formats import quantize
from flexq_bench.schemes.activations import dynamic
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.scheme import Scheme


class RoundedWeights(WeightSource):
    """Rounds layer by layer on the device; only the formats of the scheme are used.

    Raises UsageError as runnable_formats.
    """

    def __init__(self, dense: DenseWeights, scheme: Scheme) -> None:
        self.architecture, self.is_synthetic = dense.architecture, dense.is_synthetic
        self.scheme_version = scheme.version
        self._dense = dense
        self._formats = runnable_formats(scheme, dense.architecture)

    def formats(self) -> dict[str, LayerFormats]:
        return self._formats

    def ends(self, device: torch.device) -> Ends:
        return self._dense.ends(device)

    def block(self, index: int, device: torch.device) -> BlockWeights:
        dense = self._dense.block(index, device)
        linears = {}
        for name, formats in self._formats.items():
            linears[name] = _rounded(dense.linears.pop(name), formats)
        return replace(dense, linears=linears)


def runnable_formats(scheme: Scheme, architecture: DecoderArchitecture) -> dict[str, LayerFormats]:
    """Formats of the fused layers of a block under a scheme, by name.

    Raises UsageError for a layer without a kernel, and if parts of a fused layer differ in format.
    """
    formats = {
        name: fused_formats(scheme, parts_of(name), gated=architecture.is_gated)
        for name, _, _ in layer_sizes(architecture)
    }
    for name, layer_formats in formats.items():
        label_of(f"{name} under {scheme.name}", layer_formats)
    return formats


def _rounded(layer: QuantizedLayer, formats: LayerFormats) -> QuantizedLayer:
    if formats.weight.is_dense:
        weight = layer.weight
    else:
        weight = quantize(layer.weight.values, formats.weight)
    return QuantizedLayer(weight, dynamic(formats.activation), layer.bias)
