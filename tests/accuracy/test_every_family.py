"""One tiny random model of each family: evaluated, quantized, stored, read again, run by kernels.

The reference is transformers: its loss of the model that it saved, and of the same model after its
own weights were rounded by the few lines of `rounded_by_row`.
"""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from families import tiny_config, tiny_multimodal_config
from safetensors.torch import save_file
from torch.nn import functional

from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.checkpoints.model_source import auto_class, open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.streaming import model_on_meta
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.errors import UsageError
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import with_linear_layers
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")
CONTEXT = 24
TOKENS = torch.arange(3, 3 + 2 * CONTEXT) * 7 % 513
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("opt", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "stablelm", "starcoder2"),
    *("cohere2", "olmo2", "glm4", "granite", "nemotron", "apertus", "bitnet", "smollm3"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"),
    *("llama4_text", "dots1", "hunyuan_v1_moe", "exaone_moe", "solar_open", "minimax_m2"),
    *("minimax", "granitemoe", "granitemoeshared", "granitemoehybrid", "jetmoe", "phimoe"),
    *("qwen3_next", "qwen3_5_text", "gemma3n_text", "gemma4_text", "falcon_h1", "nemotron_h"),
    *("lfm2", "lfm2_moe", "jamba", "bamba", "mamba", "mamba2"),
    *("longcat_flash", "kimi_linear", "lfm3", "bailing_hybrid", "qwen4_exp_text", "gpt_neo"),
    *("recurrent_gemma", "reformer", "cohere_compass_text", "zaya"),
)
# Types that read pictures too: their decoder in its place among the other parts.
MULTIMODAL = (
    *("aria", "aya_vision", "cohere2_vision", "emu3", "exaone4_5", "gemma3", "gemma4", "glm4v"),
    *("glm4v_moe", "glm46v", "glm_ocr", "got_ocr2", "idefics2", "idefics3", "internvl"),
    *("kimi_k25", "kosmos-2.5", "lfm2_vl", "lighton_ocr", "llama4", "llava", "llava_next"),
    *("llava_next_video", "llava_onevision", "mistral3", "mllama", "paddleocr_vl", "paligemma"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    *("step3p7", "video_llama_3", "video_llava", "vipllava"),
)
# Each layout once: gated and fused layers, learned positions, Conv1D, norms of two kinds, separate
# and packed experts, latent attention, states. test_families.py has other tests of a dozen.
FAST = (
    *("llama", "phi3", "gpt2", "opt", "falcon", "gemma3n_text", "qwen2_moe", "gpt_oss"),
    *("llama4_text", "deepseek_v3", "granitemoe", "qwen3_next", "mamba2", "lfm2", "nemotron_h"),
    *("llava", "qwen3_vl_moe"),
)
REFUSED = dict.fromkeys(("inkling_text", "xlnet", "dbrx"), "unknown layout")


@pytest.fixture
def saved(tmp_path, tiny_llama):
    """saved(kind): a model of FP16 weights as transformers has it, and the folder that it saved."""

    def build(kind):
        torch.manual_seed(0)
        config = (tiny_multimodal_config if kind in MULTIMODAL else tiny_config)(kind)
        model = auto_class(config).from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and not re.search("embed|A_log|x_proj|dt_proj|conv1d", name):
                    parameter.mul_(4)
                parameter.copy_(parameter.half())
        path = tmp_path / kind
        model.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_llama / name, path)
        return model, path

    return build


@torch.no_grad()
def loss(model):
    """Mean loss of transformers' logits on the segments of TOKENS."""
    ids = TOKENS.view(-1, CONTEXT)
    logits = model(input_ids=ids).logits[:, :-1]
    return float(functional.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten()))


def own_loss(model):
    return perplexity(model, TOKENS, context=CONTEXT).mean_nll


@torch.no_grad()
def rounded_by_row(weight):
    """To 8 bits, with an FP16 scale of each row [..., K]."""
    scale = (weight.abs().amax(-1, keepdim=True) / 127).half().float()
    return (weight / scale.clamp(min=1e-12)).round().clamp(-128, 127) * scale


@torch.no_grad()
def round_weights(model, layers):
    """Round the weights of these layers, in the places where transformers has them."""
    parts = dict(model.named_modules())
    packed = {
        match[1]
        for name in layers
        if name not in parts and (match := re.match(r"(.*?)\.\d+(\.\w+_proj)?$", name))
    }
    for name in packed:
        for parameter in parts[name].parameters(recurse=False):
            if parameter.ndim == 3:
                rows_last = getattr(parts[name], "is_transposed", "Llama4" in type(model).__name__)
                values = parameter.mT if rows_last else parameter
                rounded = rounded_by_row(values)
                parameter.copy_(rounded.mT if rows_last else rounded)
    for name in layers:
        if name in parts:
            weight = parts[name].weight
            is_convolution = type(parts[name]).__name__ == "Conv1D"
            values = weight.T if is_convolution else weight
            rounded = rounded_by_row(values)
            weight.copy_(rounded.T if is_convolution else rounded)


def write(path, out):
    source = open_source(find_model(str(path)))
    return quantize_checkpoint(source, resolve("w8a16"), out, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "kind",
    [
        *FAST,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (*FAMILIES, *MULTIMODAL)
            if kind not in FAST
        ),
    ],
)
def test_family_is_evaluated_quantized_stored_and_run(saved, tmp_path, kind):
    original, path = saved(kind)
    assert own_loss(load_model(str(path), device=CPU).model) == pytest.approx(
        loss(original), rel=1e-6
    )

    checkpoint = open_checkpoint(write(path, tmp_path / "out").folder)

    round_weights(original, checkpoint.layers)
    expected = loss(original)
    stored = load_checkpoint(checkpoint, device=CPU, through="reference").model
    assert own_loss(stored) == pytest.approx(expected, rel=1e-5)
    by_kernels = load_checkpoint(checkpoint, device=CPU, through="kernels").model
    assert any(isinstance(module, KernelLinear) for module in by_kernels.modules())
    assert own_loss(by_kernels) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("kind", REFUSED)
def test_family_is_refused_in_one_line_with_the_reason(saved, tmp_path, kind):
    _, path = saved(kind)

    with pytest.raises((QuantizeError, UsageError), match=REFUSED[kind]) as refused:
        write(path, tmp_path / "out")

    assert len(str(refused.value)) <= 200
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "architectures", "reason"),
    [
        ("t5", ["T5ForConditionalGeneration"], "it has an encoder"),
        ("whisper", ["WhisperForConditionalGeneration"], "it has an encoder"),
        ("bert", ["BertForMaskedLM"], "BertForMaskedLM predicts masked tokens"),
        (
            "llama",
            ["LlamaForTokenClassification"],
            "LlamaForTokenClassification predicts no tokens",
        ),
    ],
)
def test_models_that_are_no_decoders_are_refused(tmp_path, tiny_llama, kind, architectures, reason):
    is_pair, out = kind in ("t5", "whisper"), tmp_path / "out"
    config = tiny_config(kind, architectures=architectures, is_encoder_decoder=is_pair)
    config.save_pretrained(tmp_path)
    save_file({name: torch.zeros(1) for name in "ab"}, tmp_path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, tmp_path)

    for read in (lambda: load_model(str(tmp_path), device=CPU), lambda: write(tmp_path, out)):
        with pytest.raises(UsageError, match=re.escape(f"no decoder of text ({reason})")) as error:
            read()
        assert len(str(error.value)) <= 200


def test_model_without_its_head_is_refused_by_its_class(saved, tmp_path):
    model, path = saved("llama")
    model.base_model.save_pretrained(path)

    for read in (lambda: load_model(str(path), device=CPU), lambda: write(path, tmp_path / "out")):
        with pytest.raises(UsageError, match="LlamaModel, which has no output head"):
            read()


def test_decoder_without_an_automatic_class_is_found_by_its_name():
    config = tiny_config("mllama_text_model", architectures=["MllamaForCausalLM"])

    assert auto_class(config).__name__ == "MllamaForCausalLM"


@pytest.mark.slow
def test_every_decoder_of_transformers_is_mapped_or_refused():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = with_linear_layers(model_on_meta(tiny_config(kind)))
        except Exception as error:  # of any class: a type that these sizes don't fit
            rows[kind] = f"not built: {type(error).__name__}"
            continue
        try:
            layout = map_model(model)
        except QuantizeError as error:
            rows[kind] = f"refused: {error}"
            continue
        rows[kind] = f"{layout.path}: {layout.blocks} blocks, {len(layout.sites)} layers"
    print(*(f"{kind:28}{row}" for kind, row in rows.items()), sep="\n")  # noqa: T201 - a table

    refused = [row for row in rows.values() if row.startswith("refused")]
    assert max(map(len, refused)) <= 200 + len("refused: ")
    assert len([row for row in rows.values() if ": " in row and "layers" in row]) > 0.85 * len(rows)
