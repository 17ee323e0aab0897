"""Folders of AutoAWQ, AutoGPTQ and GPTQModel, packed here as their sources say."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from safetensors.torch import save_file

from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.loading import load_model
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.writer import check_target
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.errors import UsageError

CPU = torch.device("cpu")
LAYER = "model.layers.1.mlp.down_proj"  # K = 256
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}


def rounded(weight, bits, group, *, symmetric=False):
    """Codes [N, K], codes of zero and FP16 scales [N, groups], rounded to nearest."""
    n, k = weight.shape
    grouped = weight.double().reshape(n, -1, k if group == -1 else group)
    top = (1 << bits) - 1
    low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True)
    if symmetric:
        scales = (grouped.abs().amax(-1, keepdim=True) * 2 / top).half()
        zeros = torch.full_like(scales, 1 << (bits - 1)).double()
    else:
        scales = ((high.clamp(min=0) - low) / top).half()
        zeros = (-low / scales.double()).round().clamp(1, top)
    codes = (grouped / scales.double() + zeros).round().clamp(0, top)
    return codes.reshape(n, k).int(), zeros[:, :, 0].int(), scales[:, :, 0]


def values_of(codes, zeros, scales):
    each = codes.shape[1] // zeros.shape[1]
    difference = codes.double() - zeros.double().repeat_interleave(each, 1)
    return difference * scales.double().repeat_interleave(each, 1)


def words(codes, bits):
    """Codes [rows, K] densely in int32 words, bit by bit."""
    rows, _ = codes.shape
    stream = (codes[:, :, None] >> torch.arange(bits) & 1).reshape(rows, -1, 32).long()
    unsigned = (stream << torch.arange(32)).sum(2)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).int()


def awq(weight, group=64, *, symmetric=False):
    # AutoAWQ 0.2.9, awq/modules/linear/gemm.py, WQLinear_GEMM.from_linear: place i of a word is
    # column 0, 2, 4, 6, 1, 3, 5, 7 of eight neighbours.
    def packed(matrix):
        eights = matrix.reshape(matrix.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(eights.reshape(matrix.shape), 4)

    codes, zeros, scales = rounded(weight, 4, group, symmetric=symmetric)
    return {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T}


def gptq(weight, bits=4, group=64, *, order=None, **how):
    # AutoGPTQ 0.7, auto_gptq/nn_modules/qlinear/qlinear_cuda.py, QuantLinear.pack: codes along K,
    # zero points along N, less one before they are packed.
    offset = how.pop("offset", 1)
    k = weight.shape[1]
    place = torch.arange(k) if order is None else order
    codes, zeros, scales = rounded(weight[:, place], bits, group, **how)
    own, group_of = torch.empty_like(codes), torch.empty(k, dtype=torch.int32)
    own[:, place] = codes
    group_of[place] = torch.arange(k, dtype=torch.int32) // (k if group == -1 else group)
    return {
        "qweight": words(own, bits).T,
        "qzeros": words((zeros.T - offset), bits),
        "scales": scales.T,
        "g_idx": group_of,
    }


@pytest.mark.parametrize("group", [64, 128, -1])
def test_awq_layers_are_code_minus_zero_times_scale(a_folder, dense_tensors, group):
    folder = a_folder(AWQ | {"group_size": group}, lambda _, weight: awq(weight, group))

    checkpoint = open_checkpoint(folder)
    layer = checkpoint.layer(LAYER)

    expected = values_of(*rounded(dense_tensors[f"{LAYER}.weight"], 4, group))
    assert torch.equal(layer.weight.dequantize(), expected)
    assert layer.weight_format.name == f"uint4/{'row' if group == -1 else group}"
    assert layer.activation is None
    assert checkpoint.scheme.name == f"awq:{layer.weight_format.name}"
    assert (checkpoint.kv_bits, len(checkpoint.layers)) == (16, 14)


def test_awq_layers_equal_the_conversion_of_compressed_tensors(a_folder, dense_tensors):
    stored = awq(dense_tensors[f"{LAYER}.weight"])
    converter = AutoAWQConverter(group_size=64)
    codes, scales, zeros = converter._convert_gemm_module(
        stored["qweight"], stored["scales"], stored["qzeros"]
    )
    layer = open_checkpoint(a_folder(AWQ, lambda _, weight: awq(weight))).layer(LAYER)

    assert torch.equal(layer.weight.values, codes + 8)
    assert torch.equal(layer.weight.zero_points, -8 - zeros)
    assert torch.equal(layer.weight.scales, scales)


def test_middle_zero_points_make_a_symmetric_layer(a_folder):
    folder = a_folder(AWQ, lambda _, weight: awq(weight, symmetric=True))
    layer = open_checkpoint(folder).layer(LAYER)
    assert layer.weight_format.name == "int4/64"
    assert layer.weight.zero_points is None


@pytest.mark.parametrize(
    ("layout", "symmetric", "bits", "group"),
    [
        ("gptq", True, 4, 64),
        ("gptq_v2", False, 4, 64),
        ("gptq", False, 4, 128),
        ("gptq_v2", True, 4, -1),
        ("gptq", False, 4, -1),
        ("gptq", True, 8, 128),
        ("gptq_v2", False, 8, 128),
        ("gptq_v2", True, 2, 32),
        ("gptq", False, 2, 32),
        ("gptq_v2", True, 3, 64),
        ("gptq", False, 3, 64),
    ],
)
def test_gptq_layers_are_code_minus_zero_times_scale(
    a_folder, dense_tensors, layout, symmetric, bits, group
):
    section = GPTQ | {"bits": bits, "group_size": group, "checkpoint_format": layout}

    def quantized(_, weight):
        return gptq(weight, bits, group, symmetric=symmetric, offset=int(layout == "gptq"))

    layer = open_checkpoint(a_folder(section, quantized)).layer(LAYER)

    weight = dense_tensors[f"{LAYER}.weight"]
    expected = values_of(*rounded(weight, bits, group, symmetric=symmetric))
    assert torch.equal(layer.weight.dequantize(), expected)
    kind = "int" if symmetric else "uint"
    assert layer.weight_format.name == f"{kind}{bits}/{'row' if group == -1 else group}"


def test_activation_order_is_the_input_order(a_folder, dense_tensors):
    weight = dense_tensors[f"{LAYER}.weight"]
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))

    def quantized(name, weight):
        return gptq(weight, order=order if name == LAYER else None)

    checkpoint = open_checkpoint(a_folder(GPTQ | {"desc_act": True}, quantized))

    layer = checkpoint.layer(LAYER)
    expected = torch.empty(128, 256, dtype=torch.float64)
    expected[:, order] = values_of(*rounded(weight[:, order], 4, 64))
    assert torch.equal(layer.weight.in_own_order(), expected)
    assert layer.activation_format is None  # no kernel brings the input into this order
    assert checkpoint.layer("model.layers.0.mlp.down_proj").weight.order is None


@pytest.mark.parametrize("through", ["reference", "kernels"])
def test_model_computes_with_dequantized_codes(a_folder, tiny_llama, through):
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))

    def quantized(name, weight):
        ordered = through == "reference" and name.endswith("down_proj")
        return gptq(weight, 4, 128, symmetric=True, order=order if ordered else None)

    section = GPTQ | {"group_size": 128, "sym": True, "desc_act": through == "reference"}
    checkpoint = open_checkpoint(a_folder(section, quantized))
    dense = load_model(str(tiny_llama), device=CPU).model
    del dense.model.layers[2:]
    for name in checkpoint.layers:
        values = checkpoint.layer(name).weight.in_own_order()
        dense.get_submodule(name).weight.data = values.float()

    loaded = load_checkpoint(checkpoint, device=CPU, through=through)

    ids = torch.randint(512, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        given, expected = loaded.model(ids).logits.float(), dense(ids, use_cache=False).logits
    assert torch.allclose(given, expected, atol=1e-4 if through == "reference" else 0.05)
    assert loaded.content_hash == checkpoint.content_hash


def test_layers_may_have_their_own_bits_and_groups(a_folder):
    section = GPTQ | {
        "dynamic": {
            r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
            r"-:.*\.o_proj": {},
        }
    }

    def quantized(name, weight):
        if name.endswith("o_proj"):
            return None
        return gptq(weight, 8, 32) if name.endswith("down_proj") else gptq(weight)

    checkpoint = open_checkpoint(a_folder(section, quantized))

    assert checkpoint.layer(LAYER).weight_format.name == "uint8/32"
    assert checkpoint.layer("model.layers.1.mlp.up_proj").weight_format.name == "uint4/64"
    assert len(checkpoint.layers) == 2 * 6
    assert "model.layers.0.self_attn.o_proj.weight" in checkpoint.tensor_names


def test_bias_belongs_to_its_layer(a_folder):
    def quantized(_, weight):
        return {**gptq(weight), "bias": torch.arange(weight.shape[0]) / 8}

    checkpoint = open_checkpoint(a_folder(GPTQ, quantized))

    assert checkpoint.layer(LAYER).bias.tolist() == [index / 8 for index in range(128)]
    assert f"{LAYER}.bias" not in checkpoint.tensor_names


def test_unquantized_tensors_are_unchanged(a_folder, dense_tensors):
    def as_stored_in_2023(tensors):
        more = ("rotary_emb.inv_freq", "k_scale")  # k_scale: of a KV cache that nobody asks for
        return tensors | {f"model.layers.0.self_attn.{name}": torch.ones(16) for name in more}

    folder = a_folder(GPTQ, lambda _, weight: gptq(weight), change=as_stored_in_2023)
    checkpoint = open_checkpoint(folder)
    names = {name for name in dense_tensors if not name.endswith("_proj.weight")}
    assert set(checkpoint.tensor_names) == names
    for name in names:
        assert torch.equal(checkpoint.tensor(name), dense_tensors[name])
    assert "quantization_config" not in checkpoint.config
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head.weight"):
        checkpoint.tensor("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"has no quantized layer lm_head"):
        checkpoint.layer("lm_head")


def test_hash_covers_bytes_and_quantization_settings(a_folder):
    def hash_of(section, scale=1, **config):
        def quantized(_, weight):
            parts = awq(weight)
            return {**parts, "scales": parts["scales"] * scale}

        return open_checkpoint(a_folder(section, quantized, **config)).content_hash

    first = hash_of(AWQ)
    assert len(first) == 64
    assert hash_of(AWQ, transformers_version="4.50.0") == first
    assert (
        len({first, hash_of(AWQ, 2), hash_of(AWQ | {"bits": 4.0}), hash_of(AWQ, rms_norm_eps=1e-5)})
        == 4
    )


def test_file_changed_after_hashing_is_refused(a_folder):
    folder = a_folder(AWQ, lambda _, weight: awq(weight))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.content_hash
    data = bytearray((folder / "model.safetensors").read_bytes())
    start = checkpoint._tensors.infos[f"{LAYER}.qweight"].start
    data[start] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged: the bytes of .*down_proj.qweight are not"):
        checkpoint.layer(LAYER)


@pytest.mark.parametrize(
    ("name", "section", "pack"),
    [
        # AutoGPTQ 0.7, auto_gptq/modeling/_const.py and _base.py; AutoAWQ 0.1, awq/models/base.py
        ("quantize_config.json", {"bits": 4, "group_size": 64, "sym": False}, gptq),
        (
            "quant_config.json",
            {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
            awq,
        ),
    ],
)
def test_settings_of_early_versions_are_read_from_their_file(
    a_folder, dense_tensors, name, section, pack
):
    folder = a_folder(None, lambda _, weight: pack(weight))
    (folder / name).write_text(json.dumps(section))

    layer = open_checkpoint(folder).layer(LAYER)

    expected = values_of(*rounded(dense_tensors[f"{LAYER}.weight"], 4, 64))
    assert is_checkpoint(folder)
    assert torch.equal(layer.weight.dequantize(), expected)


def test_a_tensor_in_two_shards_is_refused(a_folder, dense_tensors):
    folder = a_folder(GPTQ, lambda _, weight: gptq(weight))
    name = "model.norm.weight"
    save_file({name: dense_tensors[name]}, folder / "more.safetensors")
    files = {name: "more.safetensors", "model.embed_tokens.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(UsageError, match=r"has model.norm.weight in two files"):
        open_checkpoint(folder)


REFUSED = [
    (AWQ | {"version": "gemv"}, r"AWQ checkpoint of 4 bits in the layout gemv: read here are"),
    (AWQ | {"bits": 8}, r"AWQ checkpoint of 8 bits"),
    (AWQ | {"group_size": 0}, r"AWQ groups of 0 values"),
    (GPTQ | {"checkpoint_format": "marlin"}, r"the layout marlin: save it as gptq or"),
    (GPTQ | {"is_marlin_format": True}, r"the layout marlin: save it as gptq or"),
    (GPTQ | {"rotation": "hadamard"}, r"a GPTQ checkpoint with rotation, which is not computed"),
    (GPTQ | {"pack_dtype": "int16"}, r"packs codes into int16"),
    (GPTQ | {"bits": 5}, r"GPTQ codes of 5 bits; 2, 3, 4, 8 are read here"),
    (GPTQ | {"dynamic": {"+:(": {"bits": 8}}}, r"has the pattern '\('"),
    (AWQ | {"group_size": 32}, r"scales is \[4, 128\], expected \[8, 128\]"),
    (GPTQ | {"group_size": 32}, r"scales is \[4, 128\], expected \[8, 128\]"),
    (GPTQ | {"bits": 8}, r"is \[128, 128\], its config.json asks for \[128, 256\]"),
    (GPTQ | {"bits": "4"}, "GPTQ codes of '4' bits"),
    (GPTQ | {"dynamic": ["+:.*"]}, "`dynamic` settings that name no layers"),
    ("awq", "quantized by awq: read here are"),
    ({}, r"quantized by none: read here are compressed-tensors, awq, gptq, .* and GGUF files"),
]


def test_blocks_may_have_other_names(a_folder):
    def renamed(tensors):  # as Falcon's, BLOOM's and GPT-J's
        return {name.replace("model.layers", "transformer.h"): t for name, t in tensors.items()}

    folder = a_folder(GPTQ, lambda _, weight: gptq(weight), change=renamed)
    assert "transformer.h.1.mlp.down_proj" in open_checkpoint(folder).layers


def without(*names):
    return lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(names)}


def changed(part, change):
    return lambda tensors: {
        name: change(tensor) if name == f"{LAYER}.{part}" else tensor
        for name, tensor in tensors.items()
    }


def with_dense_weight(tensors):
    return tensors | {f"{LAYER}.weight": torch.ones(128, 256)}


WRONG_LAYERS = [
    (GPTQ, gptq, with_dense_weight, r"down_proj.weight and the codes of that layer"),
    (GPTQ | {"desc_act": True}, gptq, without("g_idx"), r"has no tensor .*down_proj\.g_idx"),
    (AWQ | {"zero_point": False}, awq, without("qzeros"), r"has no zero points \(qzeros\)"),
    (AWQ, awq, without(f"{LAYER}.qweight"), r"has no tensor .*1\.mlp\.down_proj\.qweight"),
    (  # packed by version 1
        GPTQ | {"sym": True, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, symmetric=True),
        dict,
        r"other zero points than 8.*checkpoint_format",
    ),
    (  # a zero point that wrapped
        GPTQ,
        gptq,
        changed("qzeros", lambda zeros: zeros | 15),
        r"zero points of 0.*save it as gptq_v2",
    ),
    (
        GPTQ,
        gptq,
        changed("g_idx", lambda groups: groups.clamp(max=1)),
        "doesn't make groups of 64 channels",
    ),
    (GPTQ, gptq, changed("g_idx", lambda groups: groups.flip(0)), r"desc_act says that there is"),
]


@pytest.mark.parametrize(
    ("section", "pack", "change", "message"),
    [
        *(
            (section, awq if "awq" in json.dumps(section) else gptq, dict, message)
            for section, message in REFUSED
        ),
        *WRONG_LAYERS,
    ],
)
def test_unsupported_or_contradictory_layer_is_refused(a_folder, section, pack, change, message):
    folder = a_folder(section, lambda _, weight: pack(weight), change=change)
    assert is_checkpoint(folder)
    with pytest.raises(UsageError, match=message) as raised:
        open_checkpoint(folder).layer(LAYER)
    assert "\n" not in str(raised.value)


def test_external_checkpoint_is_never_overwritten(a_folder):
    folder = a_folder(AWQ, lambda _, weight: awq(weight))
    with pytest.raises(CheckpointError, match="only a checkpoint of ours is overwritten"):
        check_target(folder, overwrite=True)


NORM, WORDS, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
WRONG = [
    # config.json asks for biases, as Qwen2's, and the layers have none
    ({"attention_bias": True}, lambda t: t, r"q_proj\.bias|o_proj\.bias|k_proj\.bias"),
    ({}, lambda t: {**t, HEAD: t[WORDS].flip(0)}, r"lm_head.weight is not model.embed_tokens"),
    ({}, lambda t: {**t, NORM: t[NORM][:-1]}, r"model.norm.weight.* \[127\]"),
    ({}, lambda t: {**t, NORM: t[NORM].int()}, r"model.norm.weight is I32, expected"),
    ({}, lambda t: {**t, NORM: t[NORM] / 0}, r"model.norm.weight holds NaN or infinity"),
    ({}, lambda t: {**t, WORDS: t[WORDS].to(torch.float8_e5m2)}, "is F8_E5M2, expected"),
]


@pytest.fixture
def gptq_folder(a_folder):
    """gptq_folder(change): layers that kernels run, after a change of all tensors."""

    def build(change, **config):
        section = GPTQ | {"group_size": 128}
        return a_folder(section, lambda _, w: gptq(w, group=128), change=change, **config)

    return build


@pytest.mark.parametrize(("config", "change", "message"), WRONG)
def test_tensors_of_another_model_are_refused(gptq_folder, config, change, message):
    folder = gptq_folder(change, tie_word_embeddings=True, **config)
    for load in (
        lambda: load_checkpoint(open_checkpoint(folder), device=CPU, through="reference"),
        lambda: CheckpointWeights(open_checkpoint(folder)).ends(CPU),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            load()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_ignored_bias_must_be_zero(gptq_folder, value):
    def with_bias(tensors):
        return {**tensors, f"{LAYER}.bias": torch.full((128,), value)}

    checkpoint = open_checkpoint(gptq_folder(with_bias))

    for load in (
        lambda: load_checkpoint(checkpoint, device=CPU, through="reference"),
        lambda: CheckpointWeights(checkpoint).block(1, CPU),
    ):
        if value == 0:
            load()
            continue
        with pytest.raises(UsageError, match=f"{LAYER} has a bias, which its architecture ignores"):
            load()


def test_stored_head_equal_to_the_embedding_is_accepted(gptq_folder):
    def with_head(tensors):
        return {**tensors, HEAD: tensors[WORDS].clone()}

    checkpoint = open_checkpoint(gptq_folder(with_head, tie_word_embeddings=True))
    model = load_checkpoint(checkpoint, device=CPU, through="reference").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ends = CheckpointWeights(checkpoint).ends(CPU)
    assert torch.equal(ends.head, ends.embedding)
