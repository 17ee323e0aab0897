"""Folders of llm-compressor, whose tensors the compressed-tensors library makes and takes apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from flexq_bench.checkpoints import open_checkpoint
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.schemes.activations import DynamicActivation, StaticActivation
from kernels.formats import NumberFormat

LAYER = "model.layers.1.mlp.down_proj"  # K = 256


def weights_of(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"} | changes


def a_section(
    weights: dict[str, Any], form: str, inputs: Any = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


def compressed(weight: torch.Tensor, weights: dict[str, Any], form: str, dtype=torch.float16):
    """The library's tensors of a layer, and the weight that it makes of them."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    args = scheme.weights
    n, k = weight.shape
    if args.strategy == "block":
        tall, wide = args.block_structure
        grouped = weight.reshape(n // tall, tall, k // wide, wide).transpose(1, 2).flatten(2)
    elif args.strategy == "tensor":
        grouped = weight.reshape(1, -1)
    else:
        grouped = weight.reshape(n, -1, args.group_size or k)
    low, high = grouped.float().amin(-1), grouped.float().amax(-1)
    scale, zero = calculate_qparams(low, high, args)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    theirs = compressor.decompress(
        {**stored, "weight_scale": stored["weight_scale"].double()}, scheme
    )["weight"]
    return stored, theirs


INTEGERS = [
    *[(weights_of(num_bits=bits), f"int{bits}/row") for bits in range(2, 9)],
    *[(weights_of(num_bits=bits, symmetric=False), f"uint{bits}/row") for bits in range(2, 9)],
    (weights_of(strategy="group", group_size=128), "int4/128"),
    (weights_of(strategy="group", group_size=32), "int4/32"),
    (weights_of(num_bits=3, strategy="group", group_size=64, symmetric=False), "uint3/64"),
    (weights_of(num_bits=8, strategy="group", group_size=64, symmetric=False), "uint8/64"),
    (weights_of(num_bits=6, strategy="group", group_size=128), "int6/128"),
]


@pytest.mark.parametrize(("weights", "name"), INTEGERS, ids=[name for _, name in INTEGERS])
def test_packed_integers_are_what_the_library_dequantizes(a_folder, dense_tensors, weights, name):
    def quantized(_, weight):
        return compressed(weight, weights, "pack-quantized")[0]

    layer = open_checkpoint(a_folder(a_section(weights, "pack-quantized"), quantized)).layer(LAYER)

    _, theirs = compressed(dense_tensors[f"{LAYER}.weight"], weights, "pack-quantized")
    assert torch.equal(layer.weight.dequantize(), theirs)
    assert layer.weight_format == NumberFormat.parse(name)
    assert layer.activation is None
    assert layer.bias is None
