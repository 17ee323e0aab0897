"""Folders of ours as the library compressed-tensors reads them."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open

from flexq_bench.checkpoints.packing import pack_codes, unpack_codes
from flexq_bench.kernels.formats import FP16, NumberFormat, quantize
from flexq_bench.schemes.activations import DynamicActivation, StaticActivation
from flexq_bench.schemes.quantized_layer import QuantizedLayer

INT8 = DynamicActivation(NumberFormat(8))
# Weight and activation of a layer that the library has words for, and how it is stored.
SAYABLE = {
    "w6a6": ("int6/128", DynamicActivation(NumberFormat(6, 128)), "pack-quantized"),
    "w3a8": ("int3/32", INT8, "pack-quantized"),
    "w4a16": ("int4/128", None, "pack-quantized"),
    "w8a16": ("int8/row", None, "pack-quantized"),
    "w8a8": ("int8/row", INT8, "int-quantized"),
    "w8a8, static": ("int8/row", StaticActivation(NumberFormat(8), 0.03), "int-quantized"),
    "w8a8, static, asymmetric": (
        "uint8/128",
        StaticActivation(NumberFormat(8, kind="asymmetric"), 0.03, 7),
        "int-quantized",
    ),
    "gptq-w4a16": ("uint4/128", None, "pack-quantized"),
    "gptq-w3a16, a row": ("uint3/row", None, "pack-quantized"),
    "fp8": ("fp8/row", DynamicActivation(NumberFormat(8, kind="float")), "float-quantized"),
    "fp8, weights": ("fp8/row", None, "float-quantized"),
}
# Those that it hasn't.
OWN = {
    "a last group that is shorter": ("int6/96", None),
    "dual-grained": ("dual4/128", INT8),
    "dual-grained, 6 bits": ("dual6/128", INT8),
    "mixed": ("mixed4/128", DynamicActivation(NumberFormat(4, 128, "mixed"))),
    "a small float": ("fp6/row", None),
    "clipped activations": ("int4/128", DynamicActivation(NumberFormat(8, clip=0.9))),
    "a last group of activations": ("int4/128", DynamicActivation(NumberFormat(8, 100))),
}
NAME = "model.layers.0.mlp.up_proj"


def a_layer(weight, activation=None):
    matrix = torch.randn(24, 256, generator=torch.Generator().manual_seed(2))
    return QuantizedLayer(quantize(matrix, NumberFormat.parse(weight)), activation)


def section_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("case", SAYABLE)
def test_library_reads_our_weights(case, write):
    weight, activation, form = SAYABLE[case]
    layer = a_layer(weight, activation)
    folder = write({NAME: layer, "model.layers.0.left": a_layer("fp16")})

    config = QuantizationConfig.model_validate(section_of(folder))
    (group,) = config.config_groups.values()
    assert (group.targets, group.format, config.format) == ([NAME], form, form)
    assert config.ignore == ["model.layers.0.left"]
    compressor = BaseCompressor.get_value_from_registry(group.format)
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {
            part: file.get_tensor(f"{NAME}.{part}")
            for part in compressor.compression_param_names(group)
        }

    real = layer.weight.dequantize()
    in_half = compressor.decompress(tensors, group)["weight"]
    assert torch.equal(in_half, real.half())  # it multiplies in the scale's type
    tensors["weight_scale"] = tensors["weight_scale"].float()
    assert torch.equal(compressor.decompress(tensors, group)["weight"].double(), real)


def test_library_finds_static_activations(write):
    weight, activation, _ = SAYABLE["w8a8, static, asymmetric"]
    folder = write({NAME: a_layer(weight, activation)})

    (group,) = QuantizationConfig.model_validate(section_of(folder)).config_groups.values()
    inputs = group.input_activations
    assert (inputs.strategy, inputs.dynamic, inputs.symmetric) == ("tensor", False, False)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.get_tensor(f"{NAME}.input_scale").tolist() == [float(torch.tensor(0.03).half())]
        assert file.get_tensor(f"{NAME}.input_zero_point").tolist() == [7 - 128]


def test_layers_of_several_formats_are_several_groups(write):
    layers = {
        "model.layers.0.a": a_layer("int6/128"),
        "model.layers.0.b": a_layer("int8/row", INT8),
    }

    config = QuantizationConfig.model_validate(section_of(write(layers)))

    assert config.format == "mixed-precision"
    assert [group.targets for group in config.config_groups.values()] == [[n] for n in layers]


@pytest.mark.parametrize("case", OWN)
def test_library_refuses_layers_in_own_format(case, write):
    section = section_of(
        write({NAME: a_layer(*OWN[case]), "model.layers.0.b": a_layer("int4/128")})
    )

    with pytest.raises(ValueError, match="format"):
        QuantizationConfig.model_validate(section)


def test_library_refuses_a_quantized_cache(write):
    section = section_of(write({NAME: a_layer("int4/128")}, kv_bits=4))

    with pytest.raises(ValueError, match="format"):
        QuantizationConfig.model_validate(section)


def test_transformers_refuses_own_format_only(write):
    from transformers.utils.quantization_config import CompressedTensorsConfig

    taken = section_of(write({NAME: a_layer("int4/128")}, at="taken"))
    refused = section_of(write({NAME: a_layer("fp6/row")}, at="refused"))

    assert CompressedTensorsConfig(**taken).quantization_config.format == "pack-quantized"
    with pytest.raises(ValueError, match="format"):
        CompressedTensorsConfig(**refused)


def test_packed_codes_have_no_gaps(write):
    folder = write({NAME: a_layer("fp5/row")})

    with safe_open(folder / "model.safetensors", "pt") as file:
        codes = file.get_tensor(f"{NAME}.weight_packed")
    assert codes.numel() * 32 == 24 * 256 * 5


def test_dense_layers_with_quantized_activations_have_own_format(write):
    layer = QuantizedLayer(quantize(torch.ones(4, 32), FP16), INT8)

    assert section_of(write({NAME: layer}))["format"] == "flexq-bench"


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("k", [1, 31, 32, 100])
def test_packed_words_are_those_of_compressed_tensors(bits, k):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, k), generator=generator)

    words = pack_codes(codes, bits)

    signed = (codes - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack_codes(words, bits, k), codes.to(torch.uint8))
