"""Decoding of each family by transformers' modules on a GPU: logits as in FP32 on a CPU."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.checkpoints.model_source import auto_class, open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.case import open_decodable
from flexq_bench.decode.modules import ModuleEngine, ModuleModel, ModuleWeights
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.registry import resolve

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "schemes"))
from families import tiny_config  # noqa: E402  its folder is on the path now

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOKENIZER = TESTS.parent / "examples" / "models" / "tiny-llama"
PROMPTS = torch.arange(3, 43).view(2, 20).int() * 7 % 513
NEW = 6
FAMILIES = (
    *("gemma2", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_next"),
    *("mamba2", "jetmoe"),
)
OTHERS = (
    *("gemma", "phi", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "stablelm"),
    *("starcoder2", "cohere2", "olmo2", "glm4", "granite", "nemotron", "apertus", "smollm3"),
    *("mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "llama4_text", "dots1", "hunyuan_v1_moe"),
    *("exaone_moe", "solar_open", "minimax_m2", "minimax", "granitemoe", "granitemoeshared"),
    *("granitemoehybrid", "phimoe", "qwen3_5_text", "gemma3n_text", "gemma4_text", "falcon_h1"),
    *("nemotron_h", "lfm2", "lfm2_moe", "jamba", "bamba", "mamba", "kimi_linear", "gpt_neo"),
)


@torch.no_grad()
def saved(kind: str, path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config(kind)
    model = auto_class(config).from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            parameter.mul_(2)  # random models have nearly equal logits
        parameter.copy_(parameter.half())
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)


@pytest.mark.parametrize(
    "kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_decoded_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / kind)
    source = open_source(find_model(str(tmp_path / kind)))
    out = tmp_path / "checkpoint"
    quantize_checkpoint(source, resolve("w8a16"), out, device=CPU, dtype=torch.float32)
    weights = open_decodable(str(out), "w8a16", 0)
    assert isinstance(weights, ModuleWeights)
    seen: list[torch.Tensor] = []

    engine = ModuleEngine(weights.load(GPU), capacity=PROMPTS.shape[1] + NEW)
    generated = engine.generate(PROMPTS.to(GPU), NEW, lambda _, x: seen.append(x.float().cpu()))

    module = load_checkpoint(open_checkpoint(out), device=CPU, through="reference").model
    reference = ModuleEngine(ModuleModel(kind, module, 0, None), capacity=engine.capacity)
    whole = reference.logits(PROMPTS)[:, -1]
    steps = [reference.more(tokens[:, None]) for tokens in generated.tokens.cpu().T[:-1]]
    expected = torch.stack([whole, *steps], 1)
    scale = float(expected.abs().max())
    torch.testing.assert_close(torch.stack(seen, 1), expected, rtol=0, atol=0.03 * scale)
