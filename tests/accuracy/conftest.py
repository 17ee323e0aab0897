from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.checkpoints.config import Extension, StoredScheme
from flexq_bench.checkpoints.writer import CheckpointWriter
from flexq_bench.cli.app import main
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import AccuracyRecord
from flexq_bench.schemes import FakeQuantizedLinear, calibration_segments, resolve


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def a_model():
    """A LLaMA with random weights."""

    def build(*, seed: int = 0, layers: int = 2, vocabulary: int = 96) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.4,
        )
        return LlamaForCausalLM(config).eval()

    return build


@pytest.fixture
def some_tokens():
    """tokens [count], seeded."""

    def build(count: int, *, vocabulary: int = 96, seed: int = 0) -> torch.Tensor:
        return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))

    return build


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """The folder of the model that the repository ships."""
    return Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """The command line in this process, with a database of the test's own."""
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(tmp_path / "flexq.sqlite"))

    def run(*arguments: str) -> SimpleNamespace:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, error=captured.err)

    return run


@pytest.fixture(scope="session")
def store_layers(tiny_llama):
    """store_layers(folder, config, …): a checkpoint of these, with tiny-llama's tokenizer."""

    def store(
        folder: Path, config: dict, extension: Extension, layers: dict, tensors: dict
    ) -> Path:
        with CheckpointWriter(folder, config, extension, overwrite=True) as writer:
            for name, layer in layers.items():
                writer.add_layer(name, layer)
            for name, tensor in tensors.items():
                writer.add_tensor(name, tensor)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                writer.add_file(tiny_llama / file)
            writer.finish()
        return folder

    return store


@pytest.fixture(scope="session")
def write_checkpoint(tiny_llama, store_layers):
    """write_checkpoint(folder, "w6a6"): tiny-llama quantized to a folder.

    change: what is done to each quantized layer before it is stored, by its name.
    """

    def write(folder: Path, name: str, *, seed: int = 0, change=None) -> Path:
        loaded = load_model(str(tiny_llama), device=torch.device("cpu"))
        scheme = resolve(name)
        calibration = None
        if scheme.needs_calibration:
            text = read_text(str(tiny_llama / "calibration.txt"))
            tokens = tokenize(text, loaded.tokenizer)
            calibration = calibration_segments(tokens, segments=8, length=256)
        scheme.quantize(loaded.model, calibration, seed=seed)
        stored = Extension(
            scheme=StoredScheme(
                name=name, version=scheme.version, options=asdict(scheme.options), seed=seed
            ),
            kv_bits=scheme.kv_bits,
            layers={},
        )
        config = {**loaded.model.config.to_dict(), "_name_or_path": "tiny-llama"}
        layers = {
            layer: module.layer
            for layer, module in loaded.model.named_modules()
            if isinstance(module, FakeQuantizedLinear)
        }
        if change is not None:
            layers = {layer: change(layer, quantized) for layer, quantized in layers.items()}
        tensors = {tensor: value.detach() for tensor, value in loaded.model.named_parameters()}
        return store_layers(folder, config, stored, layers, tensors)

    return write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, write_checkpoint) -> Path:
    """tiny-llama under flexq-w6ax, in a folder."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "flexq", "flexq-w6ax")


@pytest.fixture(scope="session")
def gguf_writer(tiny_llama):
    """gguf_writer(path, architecture, config, vocabulary): with sizes and tiny-llama's tokens."""

    def begin(path: Path, architecture: str, config: Any, vocabulary: int) -> Any:
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
        return writer

    return begin


@pytest.fixture
def stored(tmp_path):
    """stored(): what the command line has stored of accuracy."""

    def load():
        with open_database(str(tmp_path / "flexq.sqlite")) as database, database.session() as s:
            return list(queries.stored_records(s, AccuracyRecord))

    return load
