"""A quantized checkpoint as a transformers model, made of its bytes only, without the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flexq_bench.accuracy.as_decode import DTYPE, compute_as_decode, decoded_architecture
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.kernel_linear import ActivationBuffers, KernelLinear
from flexq_bench.accuracy.loading import (
    DTYPES,
    LoadedModel,
    check_vocabulary,
    chosen_dtype,
    tokenizer_at,
)
from flexq_bench.accuracy.quantized_cache import quantize_cache
from flexq_bench.accuracy.results import KERNELS, Through
from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.model_source import (
    expected_tensors,
    quiet_transformers,
    tied_tensors,
)
from flexq_bench.checkpoints.streaming import config_of, model_on_meta
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.errors import library_reason
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import replace_module, with_linear_layers


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
        model = _without_weights(checkpoint, DTYPES[chosen])
    decoded = through == KERNELS and decoded_architecture(model) is not None
    if decoded:
        chosen, model = DTYPE, model.to(DTYPES[DTYPE])
    _check_whole(checkpoint, model)
    buffers = ActivationBuffers()
    for name in checkpoint.layers:
        layer = checkpoint.layer(name, device)
        module = (
            KernelLinear(name, layer, buffers)
            if through == KERNELS
            else FakeQuantizedLinear(name, layer)
        )
        _put_in(checkpoint, model, name, module)
    for name in checkpoint.tensor_names:
        _set_tensor(checkpoint, model, name, checkpoint.tensor(name).to(device))
    model.tie_weights()
    name = checkpoint.model_name
    check_vocabulary(name, model, tokenizer)
    model = model.to(device).eval()
    if not decoded or not compute_as_decode(
        model, CheckpointWeights(checkpoint), checkpoint.kv_bits
    ):
        quantize_cache(model, checkpoint.kv_bits)
    return LoadedModel(name, checkpoint.content_hash, model, tokenizer, chosen)


def _without_weights(checkpoint: QuantizedCheckpoint, dtype: torch.dtype) -> Any:
    """Build the architecture: matrices are on the meta device, computed buffers are not."""
    try:
        return with_linear_layers(model_on_meta(config_of(checkpoint.config), dtype))
    except Exception as error:  # of any class, for example an unknown model type
        raise AccuracyError(f"can't load {checkpoint.folder}: {library_reason(error)}") from error


def _check_whole(checkpoint: QuantizedCheckpoint, model: Any) -> None:
    stored = {*checkpoint.tensor_names}
    for layer in checkpoint.layers:
        stored.add(f"{layer}.weight")
        if checkpoint.has_bias(layer):
            stored.add(f"{layer}.bias")
    lacking = expected_tensors(model).keys() - stored
    if lacking:
        raise AccuracyError(
            f"{checkpoint.folder} lacks {len(lacking)} weights of its architecture "
            f"({min(lacking)} …): quantize the model again"
        )
    for head, embedding in tied_tensors(model).items():
        checkpoint.check_tied_head(embedding, head)


def _put_in(
    checkpoint: QuantizedCheckpoint,
    model: nn.Module,
    name: str,
    module: KernelLinear | FakeQuantizedLinear,
) -> None:
    try:
        linear: Any = model.get_submodule(name)
        fits = tuple(linear.weight.shape) == (module.out_features, module.in_features)
    except AttributeError:
        fits = False
    if not fits:
        raise AccuracyError(
            f"{checkpoint.folder}: {name} is no layer of its architecture, or has other sizes: "
            "quantize the model again"
        )
    bias = module.layer.bias
    if linear.bias is None and bias is not None and bool(bias.any()):
        raise AccuracyError(
            f"{checkpoint.folder}: {name} has a bias, which its architecture ignores: quantize the "
            "model again"
        )
    replace_module(model, name, module)


def _set_tensor(
    checkpoint: QuantizedCheckpoint, model: nn.Module, name: str, tensor: torch.Tensor
) -> None:
    parent, _, child = name.rpartition(".")
    try:
        module = model.get_submodule(parent)
        current = getattr(module, child)
    except AttributeError:
        current = None
    if not isinstance(current, torch.Tensor) or current.shape != tensor.shape:
        raise AccuracyError(
            f"{checkpoint.folder}: {name} {list(tensor.shape)} has no place in its architecture: "
            "quantize the model again"
        )
    value = tensor.to(current.dtype)
    if child in module._parameters:
        module._parameters[child] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[child] = value
