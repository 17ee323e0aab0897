"""Comparison of a folder with the original's: what counts as a difference, and what never does."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoTokenizer

from flexq_bench.accuracy.artefacts.folders import compare_folders
from flexq_bench.errors import UsageError

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CLEANS = "clean_up_tokenization_spaces"
DESPITE = "bpe_even_though_it_will_corrupt_output"


def edited(file, change):
    """Change of a JSON file of a folder. change: keys with their values (None: removed), or a
    function.
    """

    def apply(folder):
        path = folder / file
        content = json.loads(path.read_text()) if path.is_file() else {}
        if callable(change):
            change(content)
        else:
            content.update(change)
            content = {key: value for key, value in content.items() if value is not None}
        path.write_text(json.dumps(content))

    return apply


def config(**values):
    return edited("config.json", values)


def tokenizer(change):
    return edited("tokenizer.json", change)


def reverse_last_merges(content):
    merges = content["model"]["merges"]
    merges[-12:] = merges[-12:][::-1]


def exchange_two_ids(content):
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300], list(vocabulary)[400]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def begin_with_a_token(content):
    special = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    processor = content["post_processor"]
    processor["single"].insert(0, special)
    processor["special_tokens"] = {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}}


def written(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def write_template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


@pytest.fixture
def original(tiny_llama, tmp_path):
    """The folder of tiny-llama, with a chat template and settings of generation."""
    folder = tmp_path / "original"
    shutil.copytree(tiny_llama, folder)
    edited("tokenizer_config.json", {"chat_template": CHATML})(folder)
    settings = {"bos_token_id": 0, "eos_token_id": 0, "temperature": 0.6, "do_sample": True}
    edited("generation_config.json", settings)(folder)
    return folder


@pytest.fixture
def differences(original, tmp_path):
    """differences(change, …): names of the differences of a copy after these changes."""

    def compare(*changes):
        folder = tmp_path / "copy"
        shutil.copytree(original, folder)
        for change in changes:
            change(folder)
        return {found.name: found.detail for found in compare_folders(folder, original)}

    return compare


CHANGES = {
    "eos of generation": (
        edited("generation_config.json", {"eos_token_id": 7}),
        "generation_config.eos_token_id",
    ),
    "temperature": (
        edited("generation_config.json", {"temperature": 9.0}),
        "generation_config.temperature",
    ),
    "reversed chat template": (
        write_template(CHATML.replace("message['content']", "message['content'][::-1]")),
        "chat_template",
    ),
    "chat template of long talks": (
        write_template("{% set messages = messages[-4:] %}" + CHATML),
        "chat_template",
    ),
    "chat template without reasoning": (
        write_template(CHATML + "{% if enable_thinking is defined %}<think>{% endif %}"),
        "chat_template",
    ),
    "chat template of documents": (
        write_template("{% if documents %}A{% endif %}" + CHATML),
        "chat_template",
    ),
    "chat template of an option's value": (
        write_template("{% if effort == 'high' %}A{% endif %}" + CHATML),
        "chat_template",
    ),
    "chat template of another role": (
        write_template("{% if messages[1].role == 'developer' %}A{% endif %}" + CHATML),
        "chat_template",
    ),
    "chat template of unusual turns": (
        write_template("{% if messages[0]['role'] == 'assistant' %}A{% endif %}" + CHATML),
        "chat_template",
    ),
    "detokenizer": (tokenizer(lambda content: content.update(decoder=None)), "tokenizer.decode"),
    "order of merges": (tokenizer(reverse_last_merges), "tokenizer.merges"),
    "ids of two tokens": (tokenizer(exchange_two_ids), "tokenizer.vocabulary"),
    "normalizer": (
        tokenizer(lambda content: content.update(normalizer={"type": "Lowercase"})),
        "tokenizer.encode",
    ),
    "added bos": (tokenizer(begin_with_a_token), "tokenizer.encode"),
    "eos of the tokenizer": (
        edited("tokenizer_config.json", {"eos_token": "a"}),
        "tokenizer.eos_token_id",
    ),
    "eos of the configuration": (config(eos_token_id=5), "config.eos_token_id"),
    "bos of the configuration": (config(bos_token_id=5), "config.bos_token_id"),
    "rope type": (
        config(rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 8.0}),
        "config.rope_parameters.rope_type",
    ),
    "rope factor": (
        config(rope_parameters={**ROPE, "rope_type": "linear", "factor": 2.0}),
        "config.rope_parameters.factor",
    ),
    "rope theta": (
        config(rope_parameters={**ROPE, "rope_theta": 5e5}),
        "config.rope_parameters.rope_theta",
    ),
    "positions": (
        config(max_position_embeddings=128 * 256),
        "config.max_position_embeddings",
    ),
    "epsilon": (config(rms_norm_eps=1e-5), "config.rms_norm_eps"),
    "key of another engine": (config(sliding_window=64), "config.sliding_window"),
    "program": (
        lambda folder: (folder / "modeling_x.py").write_text("x = 1"),
        "files.modeling_x.py",
    ),
    "adapter": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "files.adapter_config.json",
    ),
    "nested program": (
        lambda folder: written(folder / "custom_generate" / "generate.py", "x = 1"),
        "files.custom_generate/generate.py",
    ),
    "weights of another layout": (
        lambda folder: written(folder / "params.json", "{}"),
        "files.params.json",
    ),
    "more weights": (
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "more.safetensors"),
        "files.more.safetensors",
    ),
    "weights of another program": (
        lambda folder: written(folder / "model.gguf", "GGUF"),
        "files.model.gguf",
    ),
    "vocabulary of another program": (
        lambda folder: written(folder / "tokenizer.model", "x"),
        "files.tokenizer.model",
    ),
    "older vocabulary": (
        lambda folder: written(folder / "vocab.json", '{"a": 0}'),
        "files.vocab.json",
    ),
    "older key of rope": (config(rope_theta=5e5), "config.rope_theta"),
    "forced cleanup": (
        edited("tokenizer_config.json", {CLEANS: True, f"{CLEANS}_for_{DESPITE}": True}),
        "tokenizer.decode",
    ),
    "shorter texts": (
        edited("tokenizer_config.json", {"model_max_length": 100}),
        "tokenizer.model_max_length",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_artefact_is_named(differences, case):
    change, name = CHANGES[case]
    assert name in differences(change)


def resaved(folder):
    """As save_pretrained of transformers writes a tokenizer: in other files and spellings."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    tokenizer.save_pretrained(folder)


def with_older_vocabulary(folder):
    """As GPT-2's tokenizer writes it."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))


HEALTHY = {
    "copy": (),
    "vocabulary in an older form": (with_older_vocabulary,),
    "quantization settings": (
        config(
            quantization_config={"quant_method": "gptq", "bits": 4},
            transformers_version="4.46.0",
            _name_or_path="/somewhere/else",
            torch_dtype="bfloat16",
            dtype=None,
            use_cache=False,
        ),
    ),
    "keys of defaults left out": (
        config(attention_bias=None, mlp_bias=None, head_dim=None, pretraining_tp=None),
    ),
    "rope as transformers 4 spells it": (
        config(rope_parameters=None, rope_theta=10000.0, rope_scaling=None),
    ),
    "eos as a list": (config(eos_token_id=[0]),),
    "single precision": (config(rms_norm_eps=9.999999974752427e-07),),
    "padding token": (
        edited("tokenizer_config.json", {"pad_token": "<|end|>"}),
        config(pad_token_id=0),
        edited("generation_config.json", {"pad_token_id": 0}),
    ),
    "truncation of calibration": (
        tokenizer(
            lambda content: content.update(
                truncation={
                    "direction": "Right",
                    "max_length": 64,
                    "strategy": "LongestFirst",
                    "stride": 0,
                }
            )
        ),
    ),
    "template in its own file": (
        edited("tokenizer_config.json", {"chat_template": None}),
        write_template(CHATML),
    ),
    "template in other words": (write_template("{# the same #}" + CHATML),),
    "tokenizer saved again": (resaved,),
    "tokenizer class": (
        edited("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"}),
    ),
    "generation completed with defaults": (
        edited("generation_config.json", {"top_k": 50, "top_p": 1.0, "num_beams": 1}),
    ),
    "recipe of the tool": (lambda folder: (folder / "recipe.yaml").write_text("x: 1"),),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_folder_of_a_tool_has_no_difference(differences, case):
    assert differences(*HEALTHY[case]) == {}


def test_missing_generation_settings_are_one_difference(differences):
    found = differences(lambda folder: (folder / "generation_config.json").unlink())
    assert list(found) == ["generation_config.absent"]
    assert "temperature 0.6" in found["generation_config.absent"]


def test_unreadable_tokenizer_is_a_difference(differences):
    found = differences(lambda folder: (folder / "tokenizer.json").write_text("{"))
    assert "tokenizer.unreadable" in found


def test_unreadable_original_is_an_error(original, tmp_path):
    with pytest.raises(UsageError):
        compare_folders(original, tmp_path / "nowhere")
