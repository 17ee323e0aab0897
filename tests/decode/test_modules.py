"""Decoding by transformers' modules: logits and tokens of transformers itself, by family."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from flexq_bench.checkpoints.model_source import auto_class, open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.case import open_decodable
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.decode.modules import ModuleEngine, ModuleWeights
from flexq_bench.decode.operations import DecodeWorkerOperations
from flexq_bench.errors import UsageError
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.registry import resolve

sys.path.insert(0, str(Path(__file__).parents[1] / "schemes"))
from families import tiny_config

CPU = torch.device("cpu")
TRAINED = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
PROMPTS = torch.arange(3, 43).view(2, 20).int() * 7 % 513
NEW = 6
# Soft-caps; two rotary embeddings, windows of 8 tokens; partial and scaled rope; experts; latent
# attention; sinks and biased experts; linear attention; state spaces.
FAMILIES = (
    *("gemma2", "gemma3_text", "phi3", "qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss"),
    *("qwen3_next", "mamba2"),
)


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(kind, scheme): the folder of a tiny model's checkpoint, and of the model."""

    def build(kind, scheme="w8a16"):
        torch.manual_seed(0)
        config = tiny_config(kind)
        model = auto_class(config).from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "A_log" not in name:
                    parameter.mul_(4)
                parameter.copy_(parameter.half())
        path = tmp_path / kind
        model.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TRAINED / name, path)
        out = tmp_path / f"{kind}-{scheme}"
        source = open_source(find_model(str(path)))
        quantize_checkpoint(source, resolve(scheme), out, device=CPU, dtype=torch.float32)
        return out, path

    return build


@torch.no_grad()
def greedy(model):
    """Logits [B, T + NEW - 1, vocab] of the whole sequences, and the NEW tokens."""
    ids = PROMPTS.long()
    for _ in range(NEW):
        logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return logits, ids[:, PROMPTS.shape[1] :]


@pytest.mark.parametrize("kind", FAMILIES)
def test_decoded_tokens_have_the_logits_of_whole_sequences(checkpoint, kind):
    weights = open_decodable(str(checkpoint(kind)[0]), "w8a16", 0)
    assert isinstance(weights, ModuleWeights)
    model = weights.load(CPU)
    expected, _ = greedy(model.module.float())
    engine = ModuleEngine(weights.load(CPU), capacity=26)
    seen = []

    generated = engine.generate(PROMPTS, NEW, lambda position, logits: seen.append(logits))

    assert len(generated.step_ms) == NEW - 1
    first = expected[:, PROMPTS.shape[1] - 1]
    scale = float(first.abs().max())
    torch.testing.assert_close(seen[0].float(), first, rtol=0, atol=0.02 * scale)
    forced = torch.cat([PROMPTS.long(), generated.tokens], dim=1)[:, :-1]
    with torch.no_grad():
        whole = model.module(input_ids=forced, use_cache=False).logits
    steps = torch.stack(seen, dim=1).float()
    torch.testing.assert_close(steps, whole[:, PROMPTS.shape[1] - 1 :], rtol=0, atol=0.02 * scale)


def test_unquantized_family_is_decoded_as_transformers_does(checkpoint):
    from transformers import AutoModelForCausalLM

    _, path = checkpoint("gemma2")
    original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
    expected = original.generate(
        PROMPTS.long(), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )

    engine = ModuleEngine(open_decodable(str(path), "fp16", 0).load(CPU), capacity=26)

    assert torch.equal(engine.generate(PROMPTS, NEW).tokens, expected[:, PROMPTS.shape[1] :])


def test_worker_decodes_a_mixture_and_reports_its_kernels(checkpoint):
    out, _ = checkpoint("qwen3_moe", "flexq-w6ax")
    worker = DecodeWorkerOperations("cpu", 0)
    worker.check(str(out), "flexq-w6ax", 2, 26, 8)

    loaded = worker.load(str(out), "flexq-w6ax", [2], 26, "off")
    answer = worker.decode(2, 20, NEW, 8, False)

    assert loaded["kernels"]["down_proj"] == "flexq[w6a8]"
    assert loaded["content_hashes"]["16"] == open_checkpoint(out).content_hash
    assert len(answer["step_ms"]) == NEW - 1
    with pytest.raises(UsageError, match="serve no requests"):
        worker.slots(str(out), "flexq-w6ax", 26, 16, 4, None)


def test_layers_whose_blocks_fusing_would_cut_stay_separate(checkpoint):
    out, _ = checkpoint("llama", "fp8-block")  # k and v have 32 rows, blocks have 128

    model = open_decodable(str(out), "fp8-block", 0).load(CPU)
    generated = ModuleEngine(model, capacity=26).generate(PROMPTS, NEW)

    assert set(model.kernels().values()) == {"fp8-w8a8[blocks]", "torch"}
    assert torch.equal(generated.tokens, greedy(model.module)[1])


def test_state_within_modules_is_refused(checkpoint):
    model = open_decodable(str(checkpoint("recurrent_gemma")[0]), "w8a16", 0).load(CPU)
    with pytest.raises(UsageError, match="keeps its state in its modules"):
        ModuleEngine(model, capacity=26).generate(PROMPTS, NEW)


def test_layer_of_an_expert_without_tokens_returns_none():
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    linear = KernelLinear("expert", QuantizedLayer(quantize(weight, NumberFormat(8))))

    assert linear(torch.zeros(0, 128)).shape == (0, 32)


def test_dense_weight_of_a_layer_on_a_kernel_is_refused():
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    linear = KernelLinear("blocks.0.output", QuantizedLayer(quantize(weight, NumberFormat(8))))

    assert not hasattr(linear, "weight")
    with pytest.raises(QuantizeError, match=r"blocks.0.output .* --through reference"):
        linear.weight.div_(2)
