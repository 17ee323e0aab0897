"""What stands between the linear layers of a decoder: norms, attention, activation functions."""

from kernels.decoder.kv import KV_BITS, KvLayer
from kernels.decoder.operations import (
    AttentionShape,
    DecoderOperations,
    Destination,
    Norm,
)

__all__ = [
    "KV_BITS",
    "AttentionShape",
    "DecoderOperations",
    "Destination",
    "KvLayer",
    "Norm",
]
