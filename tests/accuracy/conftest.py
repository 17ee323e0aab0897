from __future__ import annotations

import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM

from flexq_bench.accuracy import bos
from flexq_bench.checkpoints.config import Extension
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.writer import CheckpointWriter
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import AccuracyRecord
from flexq_bench.schemes import model_map, resolve
from flexq_bench.schemes.channels import trace_inputs
from flexq_bench.schemes.model_files import find_model

sys.path.insert(0, str(Path(__file__).parents[1] / "schemes"))  # for `families`


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _quick_evaluation():
    """Models of one structure are traced once, and fewer beginnings are tried with BOS."""
    traced = {}

    def trace(model, blocks, layers):
        names = tuple(layers)
        key = (type(model), model.config.to_json_string(), repr(model), tuple(blocks), names)
        if key not in traced:
            traced[key] = trace_inputs(model, blocks, names)
        return traced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_map, "trace_inputs", trace)
        patch.setattr(bos, "_MAX_SEGMENTS", 2)
        yield


@pytest.fixture
def a_model(llama_config):
    """A LLaMA with random weights."""

    def build(*, seed=0, layers=2, vocabulary=96):
        torch.manual_seed(seed)
        own = {"num_hidden_layers": layers, "initializer_range": 0.4}
        config = llama_config(32, 64, vocabulary, **own)
        return LlamaForCausalLM(config).eval()

    return build


@pytest.fixture
def an_opt():
    """An OPT with random weights and biases, whose K are no multiples of 128."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=96,
        hidden_size=48,
        ffn_dim=200,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=48,
        init_std=0.3,
    )
    model = OPTForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def some_tokens():
    """tokens [count], seeded."""

    def build(count, *, vocabulary=96, seed=0):
        return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))

    return build


@pytest.fixture(scope="session")
def tiny_llama():
    """The folder of the model that the repository ships."""
    return Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


@pytest.fixture(scope="session")
def write_checkpoint(tiny_llama):
    """write_checkpoint(folder, "w6a6"): tiny-llama quantized to a folder, without calibration."""

    def write(folder, name):
        source, cpu = open_source(find_model(str(tiny_llama))), torch.device("cpu")
        quantize_checkpoint(source, resolve(name), folder, device=cpu, dtype=torch.float32)
        return folder

    return write


@pytest.fixture
def damaged(tiny_llama, tmp_path):
    """damaged(checkpoint, damage): a copy after `damage(weight)` of one layer, hashes made anew."""

    def make(folder, damage):
        source = open_checkpoint(folder)
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)  # of an earlier damage
        extension = Extension(
            scheme=source.scheme,
            kv_bits=source.kv_bits,
            layers={},
            calibration=source.calibration,
        )
        with CheckpointWriter(tmp_path / "damaged", source.config, extension) as writer:
            for name in source.layers:
                layer = source.layer(name)
                if name == "model.layers.1.mlp.down_proj":
                    layer = replace(layer, weight=damage(layer.weight))
                writer.add_layer(name, layer)
            for name in source.tensor_names:
                writer.add_tensor(name, source.tensor(name))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                writer.add_file(tiny_llama / file)
            writer.finish()
        return tmp_path / "damaged"

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, write_checkpoint):
    """tiny-llama under flexq-w6ax, in a folder."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "flexq", "flexq-w6ax")


@pytest.fixture(scope="session")
def gguf_writer(tiny_llama):
    """gguf_writer(path, architecture, config, vocabulary): with sizes and tiny-llama's tokens.

    A context manager that writes what was added at its end.
    """

    @contextmanager
    def begin(path, architecture, config, vocabulary):
        import gguf

        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(vocabulary)
        bpe = json.loads((tiny_llama / "tokenizer.json").read_text())["model"]
        tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
        unused = [f"<unused {index}>" for index in range(vocabulary - len(tokens) - 1)]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*tokens, "<|endoftext|>", *unused])
        writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
        writer.add_token_types([1] * len(tokens) + [3] * (len(unused) + 1))
        writer.add_eos_token_id(len(tokens))
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return begin


@pytest.fixture
def stored(tmp_path):
    """stored(): what the command line has stored of accuracy."""

    def load():
        with open_database(str(tmp_path / "flexq.sqlite")) as database, database.session() as s:
            return list(queries.stored_records(s, AccuracyRecord))

    return load


@pytest.fixture
def accuracy(cli, tiny_llama):
    """accuracy("--schemes", "w6a6"): on 5 segments of the held-out text."""

    def run(*options, model=tiny_llama, data="heldout.txt"):
        text = () if data is None else ("--data", str(tiny_llama / data))
        quick = ("--device", "cpu", "--max-tokens", "1275")
        return cli("accuracy", "--model", str(model), *text, *quick, *options)

    return run
