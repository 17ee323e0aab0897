"""The unquantized model in FP16: the baseline of every comparison."""

from __future__ import annotations

from flexq_bench.kernels.formats import FP16
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.scheme import QuantizationState, Scheme


class Dense(Scheme):
    """Nothing is quantized."""

    source = "the baseline of every comparison"

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        return LayerFormats(FP16)

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        """Leave every site unchanged."""
