from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.storage import load_quantized, save_quantized


@pytest.fixture
def saved(tiny_llama, calibration, tmp_path):
    """saved(name): the quantized model and its file."""

    def build(name="w6a6"):
        model, scheme = tiny_llama(), resolve(name)
        scheme.quantize(model, calibration, seed=7)
        path = tmp_path / "model.safetensors"
        save_quantized(model, path, scheme, seed=7)
        return model, path

    return build


@pytest.mark.parametrize(
    "name",
    [
        "w6a6",
        "flexq-w6ax",
        "smoothquant-w6a6",
        "dgq-w4a8[static=true,search=false]",
        "atom-w4a4[outliers=16]",
        "fp6",
    ],
)
def test_a_loaded_model_computes_what_the_saved_one_does(name, saved, tiny_llama, text):
    model, path = saved(name)
    loaded = tiny_llama()

    stored = load_quantized(loaded, path)

    assert torch.equal(loaded(text).logits, model(text).logits)
    assert (stored.scheme, stored.version, stored.seed) == (name, resolve(name).version, 7)


def test_the_header_is_json_with_the_schemes_options(saved):
    _, path = saved("flexq-w6ax[a8=o_proj]")

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["flexq-bench"])

    assert header["options"]["a8"] == ["o_proj"]
    assert header["version"] == 2


@pytest.mark.parametrize("kept", [0, 5, 200, 0.5, 0.999])
def test_a_cut_off_file_is_refused_and_leaves_the_model_as_it_was(kept, saved, tiny_llama, text):
    _, path = saved()
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    model = tiny_llama()

    with pytest.raises(QuantizeError, match="cut off or damaged"):
        load_quantized(model, path)

    assert torch.equal(model(text).logits, tiny_llama()(text).logits)


def test_a_file_made_from_another_model_is_refused(saved, tiny_llama):
    _, path = saved()
    other = tiny_llama()
    with torch.no_grad():
        other.model.embed_tokens.weight[0, 0] += 1

    with pytest.raises(QuantizeError, match="another model"):
        load_quantized(other, path)


def test_other_safetensors_and_missing_files_are_refused(saved, tiny_llama, tmp_path):
    from safetensors.torch import save_file

    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.ones(1)}, foreign)

    with pytest.raises(QuantizeError, match="no result of flexq-bench"):
        load_quantized(tiny_llama(), foreign)
    with pytest.raises(QuantizeError, match="no quantized model"):
        load_quantized(tiny_llama(), tmp_path / "none.safetensors")


def test_a_newer_format_is_refused(saved, tiny_llama, monkeypatch):
    monkeypatch.setattr("flexq_bench.schemes.storage.FORMAT_VERSION", 2)
    _, path = saved()
    monkeypatch.undo()

    with pytest.raises(QuantizeError, match="format 2"):
        load_quantized(tiny_llama(), path)


def test_a_model_that_is_quantized_already_takes_no_other_result(saved):
    model, path = saved()

    with pytest.raises(QuantizeError, match="quantized already"):
        load_quantized(model, path)


def test_a_dense_model_has_nothing_to_save(tiny_llama, tmp_path):
    with pytest.raises(QuantizeError, match="quantize the model first"):
        save_quantized(tiny_llama(), tmp_path / "x.safetensors", resolve("w6a6"), seed=0)


def test_a_file_that_lacks_a_norm_is_refused(saved, tiny_llama):
    from safetensors.torch import load_file, save_file

    _, path = saved()
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, path, metadata=metadata)

    with pytest.raises(QuantizeError, match=r"doesn't fit the model at .*input_layernorm"):
        load_quantized(tiny_llama(), path)
