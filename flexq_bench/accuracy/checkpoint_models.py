"""A quantized checkpoint as a transformers model, made of its bytes only, without the original."""

from __future__ import annotations

import torch
from torch import nn

from flexq_bench.accuracy.as_decode import DTYPE, compute_as_decode, decoded_architecture
from flexq_bench.accuracy.loading import (
    DTYPES,
    LoadedModel,
    check_vocabulary,
    chosen_dtype,
    tokenizer_at,
)
from flexq_bench.accuracy.results import KERNELS, Through
from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.model_source import (
    quiet_transformers,
)
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.kernel_linear import ActivationBuffers, KernelLinear
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.decode.stored_modules import fill, unfilled_model
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.quantized_layer import QuantizedLayer


def load_checkpoint(
    checkpoint: QuantizedCheckpoint,
    *,
    device: torch.device,
    through: Through,
    dtype: str | None = None,
) -> LoadedModel:
    """Load a checkpoint: quantized layers from their codes, other tensors as stored.

    dtype: of what is not quantized, as in load_model; through kernels, an architecture that decode
    supports is computed in FP16. Raises CheckpointError for damaged bytes, QuantizeError if kernels
    are requested and a layer has none, and AccuracyError if transformers can't build the model or a
    weight is missing in both parts.
    """
    chosen = chosen_dtype(dtype, device)
    with quiet_transformers():
        tokenizer = tokenizer_at(checkpoint.tokenizer_folder)
        model = unfilled_model(checkpoint, DTYPES[chosen])
    decoded = through == KERNELS and decoded_architecture(model) is not None
    if decoded:
        chosen, model = DTYPE, model.to(DTYPES[DTYPE])
    buffers = ActivationBuffers()

    def make(name: str, layer: QuantizedLayer) -> nn.Module:
        is_kernel = through == KERNELS
        return KernelLinear(name, layer, buffers) if is_kernel else FakeQuantizedLinear(name, layer)

    fill(model, checkpoint, device, make)
    name = checkpoint.model_name
    check_vocabulary(name, model, tokenizer)
    if not decoded or not compute_as_decode(
        model, CheckpointWeights(checkpoint), checkpoint.kv_bits
    ):
        quantize_cache(model, checkpoint.kv_bits, checkpoint.fp8_cache_scales_of_blocks())
    named = name, checkpoint.content_hash
    return LoadedModel(*named, model, tokenizer, chosen, checkpoint.dense_formats)
