"""Non-GEMM operators of a decoder block: norms, attention, activations, greedy sampling."""

from flexq_bench.kernels.decoder.kv import KV_BITS, KvLayer
from flexq_bench.kernels.decoder.operations import (
    AttentionShape,
    DecoderOperations,
    Destination,
    HeadNorms,
    Norm,
    WeightedRows,
)

__all__ = [
    "KV_BITS",
    "AttentionShape",
    "DecoderOperations",
    "Destination",
    "HeadNorms",
    "KvLayer",
    "Norm",
    "WeightedRows",
]
