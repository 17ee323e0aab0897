"""GGUF files of the usual types: dequantized models, each with a hash of its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.requantization import rounded_as_stored
from flexq_bench.checkpoints.gguf_config import nearest_format
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.streaming import StreamedModel
from flexq_bench.decode.model_weights import open_weights
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.model_files import find_model

gguf = pytest.importorskip("gguf", reason="GGUF files need flexq-bench[accuracy]")
CPU = torch.device("cpu")
HIDDEN, HEADS, VOCABULARY = 256, 4, 513
CONFIG = LlamaConfig(
    hidden_size=HIDDEN,
    intermediate_size=512,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    max_position_embeddings=64,
)
SHAPES = {  # of a block's layers, as llama.cpp calls them
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (512, HIDDEN),
    "ffn_up": (512, HIDDEN),
    "ffn_down": (HIDDEN, 512),
}


def codes(weight, kind):
    """The bytes of a quantized matrix; of Q6_K, which gguf only dequantizes, made up."""
    if kind is not gguf.GGMLQuantizationType.Q6_K:
        return gguf.quants.quantize(weight, kind)
    # ggml-common.h, block_q6_K: ql[128], qh[64], INT8 scales[16] and an FP16 d for 256 weights.
    rows, blocks = weight.shape[0], weight.shape[1] // 256
    generator = np.random.default_rng(weight.size)
    packed = generator.integers(0, 256, (rows, blocks, 210), dtype=np.uint8)
    packed[:, :, 208:] = np.array([1e-5], np.float16).view(np.uint8)
    return packed.reshape(rows, -1)


@pytest.fixture
def a_file(gguf_writer, tmp_path):
    """a_file(type): a LLaMA of one block, its layers of this type; and the layers' values."""

    def build(kind):
        path = tmp_path / f"model.{kind.name}.gguf"
        with gguf_writer(path, "llama", CONFIG, VOCABULARY) as writer:
            generator = np.random.default_rng(0)
            values = {}
            for name, shape in SHAPES.items():
                weight = generator.normal(0, 0.05, shape).astype(np.float32)
                stored = codes(weight, kind)
                values[name] = gguf.quants.dequantize(stored, kind)
                writer.add_tensor(f"blk.0.{name}.weight", stored, raw_dtype=kind)
            embedding = generator.normal(0, 0.05, (VOCABULARY, HIDDEN)).astype(np.float32)
            writer.add_tensor("token_embd.weight", embedding)
            for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
                writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
        return path, values

    return build


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q6_K"])
def test_gguf_file_equals_its_dequantized_blocks(a_file, name):
    path, values = a_file(gguf.GGMLQuantizationType[name])

    loaded = load_model(str(path), device=CPU)
    block = loaded.model.model.layers[0]

    assert loaded.name == f"model.{name}"
    assert torch.equal(block.mlp.down_proj.weight, torch.from_numpy(values["ffn_down"]))
    assert torch.equal(block.self_attn.o_proj.weight, torch.from_numpy(values["attn_output"]))
    assert loaded.tokenizer.decode(loaded.tokenizer("a lambda").input_ids) == "a lambda"
    served = open_weights(path).block(0, CPU).linears["down_proj"].weight.values
    assert torch.equal(served, torch.from_numpy(values["ffn_down"]).half())


def test_tensors_read_singly_equal_those_of_transformers(a_file):
    path, _ = a_file(gguf.GGMLQuantizationType.Q4_0)
    state = load_model(str(path), device=CPU).model.state_dict()
    source = open_source(find_model(str(path)))
    model = StreamedModel(source, CPU, torch.float32)

    for name, tensor in source.read([name for name in state if name != "lm_head.weight"], CPU):
        assert torch.equal(tensor, state[name]), name
    for name, tensor in model.read_ends():
        assert torch.equal(tensor.half(), state[name].half()), name


def test_header_is_read_once(a_file, monkeypatch):
    path, _ = a_file(gguf.GGMLQuantizationType.Q8_0)
    read, tables = [], []
    parse, table = gguf.GGUFReader.__init__, gguf.get_tensor_name_map
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *a: read.append(a) or parse(*a))
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *a: tables.append(a) or table(*a))

    load_model(str(path), device=CPU)

    assert (len(read), len(tables)) == (1, 1)
    assert isinstance(gguf.GGUFReader, type)  # as before


def test_gguf_files_have_different_hashes(a_file):
    paths = [a_file(gguf.GGMLQuantizationType[name])[0] for name in ("Q8_0", "Q4_0")]
    hashes = {load_model(str(path), device=CPU).content_hash for path in paths}
    assert len(hashes) == 2


def test_layers_have_the_formats_of_their_blocks(a_file):
    path, _ = a_file(gguf.GGMLQuantizationType.Q4_0)
    loaded = load_model(str(path), device=CPU)
    down = "model.layers.0.mlp.down_proj"

    assert loaded.formats[f"{down}.weight"] == NumberFormat(4, 32)
    assert len(loaded.formats) == len(SHAPES)  # the embedding is FP32
    original = copy.deepcopy(loaded.model)
    original.get_submodule(down).weight.data += 0.01
    made = rounded_as_stored(None, loaded.formats, original).get_submodule(down).weight
    expected = quantize(original.get_submodule(down).weight.detach(), NumberFormat(4, 32))
    assert torch.equal(made, expected.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("Q4_K", "uint4/32"), ("Q6_K", "int6/16"), ("IQ4_XS", "int4/32"), ("Q5_1", "uint5/32")),
        *(("TQ1_0", "int2/32"), ("MXFP4", "mxfp4"), ("BF16", None), ("F32", None)),
    ],
)
def test_types_of_ggml_have_nearest_formats(kind, name):
    number = nearest_format(kind)
    assert (None if number is None else number.name) == name
