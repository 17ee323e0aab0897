"""A model of which one block is in memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.streaming import StreamedModel
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")


def streamed(folder):
    return StreamedModel(open_source(find_model(str(folder))), CPU, torch.float32)


def resident(model):
    """Blocks with a weight in memory."""
    return [
        index
        for index in range(model.layout.blocks)
        if any(parameter.device.type != "meta" for parameter in model.block(index).parameters())
    ]


def test_streamed_forward_pass_loads_one_block(small_llama):
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    model = streamed(small_llama)
    tokens = torch.arange(12)[None]
    loaded = []
    for index in range(model.layout.blocks):
        model.block(index).register_forward_hook(lambda *_: loaded.append(resident(model)))

    model.load_ends()
    with model.streamed(), torch.no_grad():
        logits = model.module(input_ids=tokens, use_cache=False).logits

    assert torch.equal(logits, whole(input_ids=tokens).logits)
    assert loaded == [[0], [1], [2]]


# In a process of its own, because glibc's settings stay for the rest of a process.
FREED = """
import resource
from pathlib import Path
import torch
from flexq_bench.checkpoints.peak_memory import freed_at_once

def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20

def left_of(pieces):
    torch.ones(7 << 20)  # glibc keeps what is no larger than the largest that was freed
    before = resident_mib()
    kept = [torch.ones(1 << 18) for _ in range(pieces)]  # 1 MiB each
    del kept[::2]
    return resident_mib() - before

held = left_of(64)
with freed_at_once(torch.device("cpu")):
    print(held, left_of(64))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_memory_freed_between_tensors_is_returned():
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)

    held, freed = map(float, ran.stdout.split())
    assert held > 48
    assert freed < 40


@pytest.mark.slow
def test_peak_is_below_two_blocks_and_the_embedding(tmp_path):
    """The whole process's growth, with the sizes of SmolLM2-135M but for fewer blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config).half()
    for parameter in model.parameters():
        parameter.data.uniform_(-0.1, 0.1)
    model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    words = ("quantize", str(tmp_path / "model"), "--scheme", "flexq-w6ax", "--device", "cpu")
    ran = subprocess.run(
        [sys.executable, "-m", "flexq_bench", *words, "--out", str(tmp_path / "out"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    block = 576 * (2 * 576 + 2 * 192 + 3 * 1536) * 4

    assert json.loads(ran.stdout)["peak_bytes"] < 2 * block + 49152 * 576 * 2


def test_one_block_is_in_memory_during_quantization(
    small_llama, calibration, tmp_path, monkeypatch
):
    loaded, counts = set(), []

    class Watched(StreamedModel):
        def leave(self, index):
            loaded.update(resident(self))
            counts.append(len(resident(self)))
            super().leave(index)

    monkeypatch.setattr("flexq_bench.checkpoints.quantizing.StreamedModel", Watched)
    quantized(small_llama, tmp_path, "smoothquant-w8a8", calibration=calibration)

    assert loaded == {0, 1, 2}
    assert max(counts) == 1
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4  # a shard a block, and the ends


@pytest.fixture
def changed(small_llama, tmp_path):
    """changed(change): a copy of the small model whose tensors and configuration were changed."""

    def build(change):
        folder = tmp_path / "model"
        shutil.copytree(small_llama, folder)
        tensors, config = load_file(folder / "model.safetensors"), folder / "config.json"
        described = json.loads(config.read_text())
        change(tensors, described)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config.write_text(json.dumps(described))
        return folder

    return build


def quantized(folder, tmp_path, scheme="w6a6", **options):
    return quantize_checkpoint(
        open_source(find_model(str(folder))),
        resolve(scheme),
        tmp_path / "out",
        **options,
        device=CPU,
        dtype=torch.float16,
    )


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, config: tensors.pop(UP), "lacks 1 weights"),
        (lambda tensors, config: tensors.update({UP: tensors[UP][:1].clone()}), "asks for"),
        (lambda tensors, config: tensors[UP].fill_(torch.nan), "NaN"),
        (lambda tensors, config: tensors[UP].fill_(1e6), "infinity"),
        (lambda tensors, config: config.update(model_type="perceptron"), "can't load"),
        (lambda tensors, config: config.update(num_hidden_layers=0), "asks for 0 blocks"),
        (lambda tensors, config: config.update(num_hidden_layers=10**6), "for 1000000 blocks"),
        (
            lambda tensors, config: config.update(num_hidden_layers=2),
            r"no place for \(model.layers.2",
        ),
        (
            lambda tensors, config: tensors.update({f"{UP[:-6]}bias": tensors[UP][:, 0].clone()}),
            r"no place for \(.*up_proj.bias",
        ),
    ],
)
def test_failed_quantization_leaves_no_files(changed, tmp_path, change, message):
    folder = changed(change)

    with pytest.raises(CheckpointError, match=message):
        quantized(folder, tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("scheme", "kv_bits", "message"),
    [("fp16", None, "quantizes nothing"), ("w6a6", 5, "have 16, 8 or 4 bits, got 5")],
)
def test_scheme_without_layers_and_unknown_cache_are_refused(
    small_llama, tmp_path, scheme, kv_bits, message
):
    with pytest.raises(CheckpointError, match=message):
        quantized(small_llama, tmp_path, scheme, kv_bits=kv_bits)


def test_tied_head_is_stored_once(changed, tmp_path):
    def tie(tensors, config):
        config["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]

    quantized(changed(tie), tmp_path)

    checkpoint = open_checkpoint(tmp_path / "out")
    assert "lm_head.weight" not in checkpoint.tensor_names
    assert checkpoint.config["tie_word_embeddings"] is True


def test_model_stored_without_head_is_read(tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=40,
            max_position_embeddings=16,
            word_embed_proj_dim=32,
        )
    )
    folder = tmp_path / "opt"
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})

    quantized(folder, tmp_path)

    checkpoint = open_checkpoint(tmp_path / "out")
    assert "model.decoder.layers.0.fc1" in checkpoint.layers
    bias = checkpoint.layer("model.decoder.layers.0.fc1").bias
    assert torch.equal(bias, model.model.decoder.layers[0].fc1.bias.half())
