"""A quantized checkpoint as a transformers model, made of its bytes only, without the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.model_source import expected_tensors, tied_tensors
from flexq_bench.checkpoints.streaming import config_of, model_on_meta
from flexq_bench.errors import UsageError, library_reason
from flexq_bench.schemes.linear_layers import replace_module, with_linear_layers
from flexq_bench.schemes.quantized_layer import QuantizedLayer

MakeLayer = Callable[[str, QuantizedLayer], nn.Module]


def unfilled_model(checkpoint: QuantizedCheckpoint, dtype: torch.dtype) -> Any:
    """The checkpoint's model, matrices on the meta device. Raises UsageError for an invalid one."""
    try:
        return with_linear_layers(model_on_meta(config_of(checkpoint.config), dtype))
    except Exception as error:  # of any class, for example an unknown model type
        raise UsageError(f"can't load {checkpoint.folder}: {library_reason(error)}") from error


def fill(
    model: Any, checkpoint: QuantizedCheckpoint, device: torch.device, make: MakeLayer
) -> None:
    """Fill an `unfilled_model`, and move it to the device.

    make: a module of a quantized layer, of its name and codes. Raises CheckpointError for damaged
    bytes and if a weight is missing or has no place, and errors of `make`.
    """
    _check_whole(checkpoint, model)
    for name in checkpoint.layers:
        _put_in(checkpoint, model, name, make(name, checkpoint.layer(name, device)))
    for name in checkpoint.tensor_names:
        _set_tensor(checkpoint, model, name, checkpoint.tensor(name).to(device))
    model.tie_weights()
    model.to(device).eval()


def _check_whole(checkpoint: QuantizedCheckpoint, model: Any) -> None:
    stored = {*checkpoint.tensor_names}
    for layer in checkpoint.layers:
        stored.add(f"{layer}.weight")
        if checkpoint.has_bias(layer):
            stored.add(f"{layer}.bias")
    lacking = expected_tensors(model).keys() - stored
    if lacking:
        raise CheckpointError(
            f"{checkpoint.folder} lacks {len(lacking)} weights of its architecture "
            f"({min(lacking)} …): quantize the model again"
        )
    for head, embedding in tied_tensors(model).items():
        checkpoint.check_tied_head(embedding, head)


def _put_in(
    checkpoint: QuantizedCheckpoint,
    model: nn.Module,
    name: str,
    module: Any,
) -> None:
    try:
        linear: Any = model.get_submodule(name)
        fits = tuple(linear.weight.shape) == (module.out_features, module.in_features)
    except AttributeError:
        fits = False
    if not fits:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is no layer of its architecture, or has other sizes: "
            "quantize the model again"
        )
    bias = module.layer.bias
    if linear.bias is None and bias is not None and bool(bias.any()):
        raise CheckpointError(
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
        raise CheckpointError(
            f"{checkpoint.folder}: {name} {list(tensor.shape)} has no place in its architecture: "
            "quantize the model again"
        )
    value = tensor.to(current.dtype)
    if child in module._parameters:
        module._parameters[child] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[child] = value
