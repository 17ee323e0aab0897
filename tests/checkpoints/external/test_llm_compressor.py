"""Folders of llm-compressor, whose tensors the compressed-tensors library makes and takes apart."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.activations import DynamicActivation, StaticActivation
from flexq_bench.schemes.kernel_choice import kernel_label

LAYER = "model.layers.1.mlp.down_proj"  # K = 256


def weights_of(**changes):
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"} | changes


def a_section(weights, form, inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


def compressed(weight, weights, form, dtype=torch.float16):
    """The library's tensors of a layer, and the weight that it makes of them."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    args = scheme.weights
    if not args.symmetric:
        weight = weight.clamp(min=-0.05)
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


@pytest.fixture
def library_folder(a_folder):
    """library_folder(weights, form): tiny-llama, its layers compressed by the library.

    section: changes of its quantization_config. stored: more tensors of each layer.
    """

    def build(
        weights,
        form="pack-quantized",
        *,
        inputs=None,
        section=None,
        stored=None,
        dtype=torch.float16,
        **more,
    ):
        def quantized(_, weight):
            return {**compressed(weight, weights, form, dtype)[0], **(stored or {})}

        return a_folder(a_section(weights, form, inputs) | (section or {}), quantized, **more)

    return build


W8, F8 = weights_of(num_bits=8), weights_of(num_bits=8, type="float")
INT4 = weights_of(strategy="group", group_size=128)
A_TENSOR = {"strategy": "tensor", "dynamic": False}
WEIGHTS = [
    *[(weights_of(num_bits=bits), "pack-quantized", f"int{bits}/row") for bits in (3, 8)],
    *[
        (weights_of(num_bits=bits, symmetric=False), "pack-quantized", f"uint{bits}/row")
        for bits in range(2, 9)
    ],
    *[
        (weights_of(strategy="group", **settings), "pack-quantized", name)
        for name, settings in {
            "int4/128": {"group_size": 128},
            "int4/32": {"group_size": 32},
            "uint3/64": {"num_bits": 3, "group_size": 64, "symmetric": False},
            "uint8/64": {"num_bits": 8, "group_size": 64, "symmetric": False},
            "int6/128": {"num_bits": 6, "group_size": 128},
        }.items()
    ],
    (weights_of(strategy="tensor", symmetric=False), "pack-quantized", "uint4/row"),
    (W8, "int-quantized", "int8/row"),
    (weights_of(num_bits=4), "int-quantized", "int4/row"),
    (W8 | {"symmetric": False}, "int-quantized", "uint8/row"),
    (W8 | {"strategy": "tensor"}, "int-quantized", "int8/row"),
    (W8 | {"strategy": "tensor", "symmetric": False}, "naive-quantized", "uint8/row"),
    (F8, "float-quantized", "fp8/row"),
    (F8 | {"strategy": "tensor"}, "float-quantized", "fp8/row"),
    (F8 | {"strategy": "block", "block_structure": [32, 64]}, "float-quantized", "fp8/32x64"),
]


@pytest.mark.parametrize(("weights", "form", "name"), WEIGHTS)
def test_compressed_weights_equal_the_library(library_folder, dense_tensors, weights, form, name):
    layer = open_checkpoint(library_folder(weights, form)).layer(LAYER)

    _, theirs = compressed(dense_tensors[f"{LAYER}.weight"], weights, form)
    assert torch.equal(layer.weight.dequantize(), theirs)
    assert layer.weight_format == NumberFormat.parse(name)
    assert layer.activation is None
    assert layer.bias is None


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_before_version_0_18_are_unpacked(a_folder, dense_tensors, bits):
    # compressed-tensors 0.12, compressors/quantized_compressors/pack_quantized.py, pack_to_int32:
    # 32 // bits codes a word, the lowest bits first; none crosses into the next word.
    weights = weights_of(num_bits=bits, symmetric=False, strategy="group", group_size=64)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)

    def older(matrix):
        each = 32 // bits
        codes = matrix.int() + (1 << (bits - 1))
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
        places = (
            codes.view(codes.shape[0], -1, each) << torch.arange(each, dtype=torch.int32) * bits
        )
        return places.sum(2, dtype=torch.int32)

    def quantized(_, weight):
        stored, _ = compressed(weight, weights, "pack-quantized")
        codes = unpack_from_int32(stored["weight_packed"], bits, weight.shape)
        zeros = unpack_from_int32(
            stored["weight_zero_point"], bits, (weight.shape[0], weight.shape[1] // 64), 0
        )
        assert scheme.weights.group_size == 64
        packed = {"weight_packed": older(codes), "weight_zero_point": older(zeros.T).T}
        return {**stored, **packed}

    folder = a_folder(a_section(weights, "pack-quantized"), quantized)

    _, theirs = compressed(dense_tensors[f"{LAYER}.weight"], weights, "pack-quantized")
    assert torch.equal(open_checkpoint(folder).layer(LAYER).weight.dequantize(), theirs)


A_TOKEN = {"strategy": "token", "dynamic": True}
ACTIVATIONS = [
    (W8, W8 | A_TOKEN, {}, DynamicActivation(NumberFormat(8))),
    (W8, weights_of() | A_TOKEN, {}, DynamicActivation(NumberFormat(4))),
    (F8, F8 | A_TOKEN, {}, DynamicActivation(NumberFormat(8, None, "float"))),
    (
        F8,
        F8 | {"strategy": "group", "group_size": 128, "dynamic": True},
        {},
        DynamicActivation(NumberFormat(8, 128, "float")),
    ),
    (
        W8,
        W8 | A_TOKEN | {"symmetric": False},
        {},
        DynamicActivation(NumberFormat(8, None, "asymmetric")),
    ),
    (
        F8,
        F8 | A_TENSOR,
        {"input_scale": torch.tensor([0.125])},
        StaticActivation(NumberFormat(8, None, "float"), 0.125),
    ),
    (
        W8,
        W8 | A_TENSOR | {"symmetric": False},
        {
            "input_scale": torch.tensor([0.125]).half(),
            "input_zero_point": torch.tensor([-28], dtype=torch.int8),
        },
        StaticActivation(NumberFormat(8, None, "asymmetric"), 0.125, 100),
    ),
]


@pytest.mark.parametrize(("weights", "inputs", "tensors", "expected"), ACTIVATIONS)
def test_activations_follow_the_configuration(library_folder, weights, inputs, tensors, expected):
    form = "float-quantized" if weights["type"] == "float" else "int-quantized"

    folder = library_folder(weights, form, inputs=inputs, stored=tensors)
    layer = open_checkpoint(folder).layer(LAYER)

    assert layer.activation == expected
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).half()
    assert float((layer.activation(x) - x).abs().max()) < 0.5


def test_groups_are_matched_by_name_then_pattern_then_class(a_folder):
    int4, int8 = weights_of(strategy="group", group_size=128), weights_of(num_bits=8)
    section = a_section(int4, "mixed-precision")
    groups = {
        "group_0": {"targets": ["Linear"], "weights": int4, "format": "pack-quantized"},
        "group_1": {
            "targets": [r"re:.*\.1\.mlp\..*"],
            "weights": int8,
            "input_activations": int8 | A_TOKEN,
            "format": "int-quantized",
        },
        "group_2": {"targets": [LAYER], "weights": F8, "format": "float-quantized"},
    }
    section |= {"config_groups": groups, "ignore": ["re:.*o_proj", "lm_head"]}

    def quantized(name, weight):
        if name.endswith("o_proj"):
            return None
        if name == LAYER:
            return compressed(weight, F8, "float-quantized")[0]
        if ".1.mlp." in name:
            return compressed(weight, int8, "int-quantized")[0]
        return compressed(weight, int4, "pack-quantized")[0]

    checkpoint = open_checkpoint(a_folder(section, quantized))

    assert checkpoint.layer(LAYER).weight_format.name == "fp8/row"
    assert checkpoint.layer("model.layers.1.mlp.up_proj").weight_format.name == "int8/row"
    assert checkpoint.layer("model.layers.0.mlp.up_proj").weight_format.name == "int4/128"
    assert len(checkpoint.layers) == 2 * 6
    assert "model.layers.1.self_attn.o_proj.weight" in checkpoint.tensor_names
    assert checkpoint.scheme.name == "compressed-tensors:mixed"


def test_an_activation_order_is_kept(a_folder, dense_tensors):
    weights = weights_of(strategy="group", group_size=64)
    weight = dense_tensors[f"{LAYER}.weight"]
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))

    def quantized(name, weight):
        if name != LAYER:
            return compressed(weight, weights, "pack-quantized")[0]
        # As compressed-tensors 0.12 packs: the codes in the channels' own order, with g_idx.
        stored, _ = compressed(weight[:, order], weights, "pack-quantized")
        codes = unpack_from_int32(stored["weight_packed"], 4, weight.shape)
        own = torch.empty_like(codes)
        own[:, order] = codes
        group_of = torch.empty(256, dtype=torch.int32)
        group_of[order] = torch.arange(256, dtype=torch.int32) // 64
        return {**stored, "weight_packed": pack_to_int32(own, 4), "weight_g_idx": group_of}

    section = a_section(weights | {"actorder": "group"}, "pack-quantized")
    layer = open_checkpoint(a_folder(section, quantized)).layer(LAYER)

    _, theirs = compressed(weight[:, order], weights, "pack-quantized")
    assert layer.weight.order is not None
    assert torch.equal(layer.weight.in_own_order()[:, order], theirs)


@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_zero_points_of_early_versions_are_read(a_folder, dense_tensors, strategy):
    # compressed-tensors 0.8, compressors/quantized_compressors/pack_quantized.py: only weights are
    # packed.
    group = {"group_size": 128} if strategy == "group" else {}
    weights = weights_of(strategy=strategy, symmetric=False, **group)

    def quantized(_, weight):
        stored, _ = compressed(weight, weights, "pack-quantized")
        shape = stored["weight_scale"].shape
        zeros = unpack_from_int32(stored["weight_zero_point"], 4, shape, packed_dim=0)
        return {**stored, "weight_zero_point": zeros}

    layer = open_checkpoint(a_folder(a_section(weights, "pack-quantized"), quantized)).layer(LAYER)

    _, theirs = compressed(dense_tensors[f"{LAYER}.weight"], weights, "pack-quantized")
    assert torch.equal(layer.weight.dequantize(), theirs)


SAME = [
    {"format": None},
    {"format": "mixed-precision"},
    {"transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_output"}]}}}},
    {"sparsity_config": {"format": "dense"}, "version": "0.12.2", "unknown_and_empty": {}},
    {
        "config_groups": {  # of groups with the same target the library takes the last
            "a": {"targets": ["Linear"], "weights": INT4 | {"group_size": 64}},
            "b": {"targets": ["Linear"], "weights": INT4 | {"actorder": "static"}},
        }
    },
    {"config_groups": {"a": {"targets": ["re:.*"], "weights": INT4 | {"strategy": "GROUP"}}}},
]


@pytest.mark.parametrize("changes", SAME)
def test_equivalent_settings_give_equal_layers(library_folder, dense_tensors, changes):
    folder = library_folder(INT4, section=changes)

    _, theirs = compressed(dense_tensors[f"{LAYER}.weight"], INT4, "pack-quantized")
    assert torch.equal(open_checkpoint(folder).layer(LAYER).weight.dequantize(), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_beyond_fp16_precision_are_exact(library_folder, dense_tensors, dtype):
    layer = open_checkpoint(library_folder(W8, "int-quantized", dtype=dtype)).layer(LAYER)

    _, theirs = compressed(dense_tensors[f"{LAYER}.weight"], W8, "int-quantized", dtype)
    assert torch.equal(layer.weight.dequantize(), theirs.double())
    assert layer.weight.scales.dtype == (torch.float16 if dtype == torch.bfloat16 else dtype)


def test_kernel_takes_scales_rounded_to_fp16(library_folder, dense_tensors):
    layer = open_checkpoint(library_folder(W8, "int-quantized", dtype=torch.float32)).layer(LAYER)

    assert kernel_label(layer.weight_format, layer.activation_format) == "w8a16"
    rounded = layer.weight.with_half_scales()
    assert rounded.scales.dtype == torch.float16
    assert torch.allclose(rounded.dequantize(), layer.weight.dequantize(), rtol=2**-11, atol=0)


def test_quantized_output_head_is_dequantized(library_folder, dense_tensors, caplog):
    stored, theirs = compressed(dense_tensors["model.embed_tokens.weight"], W8, "pack-quantized")

    def with_head(tensors):
        return tensors | {f"lm_head.{part}": tensor for part, tensor in stored.items()}

    checkpoint = open_checkpoint(
        library_folder(W8, section={"ignore": []}, change=with_head, tie_word_embeddings=False)
    )

    assert "lm_head" not in checkpoint.layers
    assert torch.equal(checkpoint.tensor("lm_head.weight").double(), theirs)
    assert "lm_head is quantized in it" in caplog.text


def one_group(**changes):
    return a_section(weights_of(strategy="group", group_size=128, **changes), "pack-quantized")


REFUSED = [
    ({"format": "marlin-24"}, r"is marlin-24, which is not read here: save it as"),
    ({"kv_cache_scheme": W8 | A_TENSOR}, r"caches keys and values as int of 8 bits"),
    ({"kv_cache_scheme": F8 | A_TENSOR}, r"scales of an FP8 cache for 0 of 2 blocks"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    ({"transform_config": {"config_groups": {"R1": {}}}}, "rotates activations"),
    ({"config_groups": {}}, "no group of config_groups"),
    ({"config_groups": {"a": {"weights": {}}}}, "config_groups.a.targets: Field required"),
    ({"config_groups": {"W4A16": ["Linear"]}}, "names the preset 'W4A16' in place of settings"),
    ({"weight_transform": {"a": 1}}, "quantization_config has 'weight_transform', which no"),
    (one_group(pre_scale=2.0), "quantization_config has 'pre_scale', which no version"),
    (one_group(actorder="group"), "has no tensor .*down_proj.weight_g_idx"),
    (
        {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
        "rotates activations",
    ),
    ({"ignore": ["re:.*mlp.*"]}, "says that it is not quantized"),
    ({"ignore": ["re:("]}, "has the pattern '\\('"),
    ({"quant_method": "aqlm"}, "quantized by aqlm: codes of vectors"),
    ({"quant_method": "hqq"}, "quantized by hqq, and none of its tensors is: copy the folder"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_unsupported_settings_are_refused_in_one_line(library_folder, changes, message):
    folder = library_folder(INT4, section=changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(folder).layer(LAYER)
    assert "\n" not in str(raised.value)


NOT_READ = [
    (W8 | {"strategy": "tensor", "dynamic": True}, "dynamic activations with a scale a tensor"),
    (W8 | A_TENSOR, "has no tensor model.layers.1.mlp.down_proj.input_scale"),
]


@pytest.mark.parametrize(("inputs", "message"), NOT_READ)
def test_unsupported_activations_are_refused(library_folder, inputs, message):
    folder = library_folder(W8, "int-quantized", inputs=inputs)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).layer(LAYER)


DAMAGE = [
    ("weight_scale", None, "has no tensor .*down_proj.weight_scale"),
    ("weight_packed", None, "has no tensor .*down_proj.weight_packed"),
    ("weight_scale", lambda scale: scale[:-1], r"weight_scale is \[127, 2\], expected \[128, 2\]"),
    ("weight_scale", lambda scale: scale.fill_(torch.nan), "weight_scale holds NaN or infinity"),
    ("weight_scale", lambda scale: scale * 0, "weight_scale holds nothing but zeros"),
    ("weight_scale", lambda scale: scale.int(), "weight_scale is I32, expected float16 or"),
    ("weight_packed", lambda words: words[:, 1:], r"weight_packed is \[128, 31\], expected"),
    ("weight_shape", lambda shape: shape.flip(0), r"is \[256, 128\], its config.json asks for"),
]


@pytest.mark.parametrize(("part", "change", "message"), DAMAGE)
def test_inconsistent_tensors_are_named(library_folder, part, change, message):
    def damaged(tensors):
        name = f"{LAYER}.{part}"
        tensor = tensors.pop(name)
        return tensors if change is None else {**tensors, name: change(tensor)}

    folder = library_folder(INT4, change=damaged)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).layer(LAYER)
