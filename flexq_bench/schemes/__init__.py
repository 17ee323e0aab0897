"""Quantization schemes: how a model's weights and activations are rounded, in plain torch.

`resolve` returns the Scheme of a name such as `flexq-w6ax`. Its `quantize` replaces the linear
layers of a Hugging Face decoder by FakeQuantizedLinear layers, with calibration data if the method
needs them. Each of these layers has a QuantizedLayer: the codes that checkpoints store and kernels
multiply.

Exported names are imported on first use, so that reading a model's files (`schemes.model_files`)
does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexq_bench.packages import exported_on_use

if TYPE_CHECKING:
    from flexq_bench.schemes.calibration import Calibration, calibration_segments
    from flexq_bench.schemes.errors import QuantizeError
    from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
    from flexq_bench.schemes.flexq import FlexqOptions
    from flexq_bench.schemes.model_map import map_model
    from flexq_bench.schemes.own_schemes import LayerStatistics, own_scheme
    from flexq_bench.schemes.quantized_layer import QuantizedLayer
    from flexq_bench.schemes.registry import named_schemes, resolve
    from flexq_bench.schemes.scheme import Progress, QuantizationState, Scheme

__all__ = [
    "Calibration",
    "FakeQuantizedLinear",
    "FlexqOptions",
    "LayerStatistics",
    "Progress",
    "QuantizationState",
    "QuantizeError",
    "QuantizedLayer",
    "Scheme",
    "calibration_segments",
    "map_model",
    "named_schemes",
    "own_scheme",
    "resolve",
]

_MODULES = {
    "Calibration": "calibration",
    "FakeQuantizedLinear": "fake_quantization",
    "FlexqOptions": "flexq",
    "LayerStatistics": "own_schemes",
    "Progress": "scheme",
    "QuantizationState": "scheme",
    "QuantizeError": "errors",
    "QuantizedLayer": "quantized_layer",
    "Scheme": "scheme",
    "calibration_segments": "calibration",
    "map_model": "model_map",
    "named_schemes": "registry",
    "own_scheme": "own_schemes",
    "resolve": "registry",
}


__getattr__ = exported_on_use(__name__, _MODULES)
