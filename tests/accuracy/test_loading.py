from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.accuracy.loading import load_model
from flexq_bench.errors import UsageError
from flexq_bench.schemes.model_files import find_model

CPU = torch.device("cpu")
ONE = torch.tensor([1])
UP, QWEIGHT = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.qweight"


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """A copy of tiny-llama to spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_folder_is_loaded_with_its_tokenizer(tiny_llama):
    loaded = load_model(str(tiny_llama), device=CPU)
    assert (loaded.name, loaded.dtype, loaded.context()) == ("tiny-llama", "float32", 256)
    assert not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer("a lambda").input_ids) == "a lambda"


def test_hash_covers_the_configuration(tiny_llama, folder):
    same = load_model(str(tiny_llama), device=CPU).content_hash
    assert load_model(str(folder), device=CPU).content_hash == same
    change(folder / "config.json", rms_norm_eps=1e-5)
    assert load_model(str(folder), device=CPU).content_hash != same


def test_weights_have_the_requested_data_type(tiny_llama):
    loaded = load_model(str(tiny_llama), device=CPU, dtype="bfloat16")
    assert loaded.model.dtype is torch.bfloat16
    with pytest.raises(UsageError, match="no data type 'fp8': there are float32"):
        load_model(str(tiny_llama), device=CPU, dtype="fp8")


def spoil_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def add_shard(folder):
    """A second copy of the weights, which only the index names."""
    shutil.copy(folder / "model.safetensors", folder / "second.safetensors")
    spoil_index(folder, {"a": "second.safetensors"})


def cut_off(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def index_elsewhere(folder, place):
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    spoil_index(folder, {"a": place})


def rename(folder, name):
    (folder / "model.safetensors").rename(folder / name)


def add_head(folder):
    """An output head of its own, although the configuration ties it to the embeddings."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1.1
    save_file(tensors, folder / "model.safetensors")


def drop_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def enlarge_tokenizer(folder):
    config = json.loads((folder / "tokenizer.json").read_text())
    config["added_tokens"].append(
        config["added_tokens"][0] | {"id": 512, "content": "<|more|>", "special": True}
    )
    (folder / "tokenizer.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_off, r"model.safetensors is cut off or damaged .*no part"),
        (
            lambda f: spoil_index(f, {"a": "model.safetensors", "b": "second.safetensors"}),
            r"lacks second\.safetensors",
        ),
        (add_shard, r"has model\.safetensors and an index of other files"),
        (lambda f: spoil_index(f, ["model.safetensors"]), "which file has which weight"),
        (lambda f: index_elsewhere(f, "../other.safetensors"), "names a file elsewhere"),
        (lambda f: index_elsewhere(f, "/srv/other.safetensors"), "names a file elsewhere"),
        (lambda f: index_elsewhere(f, "a/b"), "names a file elsewhere"),
        (
            lambda f: rename(f, "model-00001-of-00002.safetensors"),
            r"no model\.safetensors\.index\.json",
        ),
        (lambda f: rename(f, "pytorch_model.bin"), r"has no \.safetensors file"),
        (add_head, "lm_head.weight is not model.embed_tokens.weight"),
        (drop_tokenizer, "has no tokenizer that transformers reads"),
        (
            enlarge_tokenizer,
            r"largest token is 512 \('<\|more\|>'\), the model has .* for 512 tokens",
        ),
    ],
)
def test_damaged_folder_is_refused(folder, spoil, message):
    spoil(folder)
    with pytest.raises(UsageError, match=message):
        load_model(str(folder), device=CPU)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        (UP, lambda weight: weight.index_fill(0, ONE, torch.nan), UP + " holds NaN or infinity"),
        (UP, lambda weight: weight.index_fill(0, ONE, torch.inf), UP + " holds NaN or infinity"),
        (UP, lambda weight: weight.to(torch.int8), rf"quantized already \(.*{UP} of type"),
        (UP, lambda weight: weight.to(torch.float8_e4m3fn), rf"quantized already \(.*{UP} of type"),
        (QWEIGHT, lambda _: torch.zeros(4, 4, dtype=torch.int32), rf"already \({QWEIGHT}\)"),
    ],
)
def test_nonfinite_or_quantized_weight_is_named(folder, name, how, message):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = how(tensors.get(name))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=message):
        load_model(str(folder), device=CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, r"lacks 9 weights .*model.layers.4"),
        ({"num_hidden_layers": 3}, r"has 9 weights .*no place for \(model.layers.3.*in part"),
        ({"num_hidden_layers": 10**9}, r"38 weights, and its config\.json asks for 1000000000"),
        ({"intermediate_size": 250}, r"down_proj.weight is \[128, 256\], .* \[128, 250\]"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized already \(gptq\)"),
        ({"quantization_config": "gptq"}, r"quantized already \(gptq\)"),
        ({"compression_config": {"quant_method": "sparse"}}, r"quantized already \(sparse\)"),
        ({"model_type": "foo"}, "can't load model: .*`foo`"),
        ({"hidden_size": "128"}, "can't load model: .*hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "can't load model: Missing required keys in"),
    ],
)
def test_invalid_configuration_is_refused_in_one_line(folder, changes, message):
    change(folder / "config.json", **changes)
    with pytest.raises(UsageError, match=message) as raised:
        load_model(str(folder), device=CPU)
    assert "\n" not in str(raised.value)


def test_code_in_a_model_folder_is_not_run(folder, monkeypatch, tmp_path):
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast\n"
        "class C(PretrainedConfig): model_type = 'evil'\n"
        "class M(PreTrainedModel): config_class = C\n"
        "class T(PreTrainedTokenizerFast): pass\n"
    )
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    change(folder / "config.json", auto_map=code, model_type="evil")
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.T"]})
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UsageError, match="can't load model"):
        load_model(str(folder), device=CPU)

    change(folder / "config.json", model_type="llama")  # which transformers has code for
    load_model(str(folder), device=CPU)

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/no/such/folder", "no model /no/such/folder: give a folder"),
        ("somewhere", "no model somewhere: give a folder"),
        ("~nobody-of-this-name/x/y", "no model ~nobody"),
        ("a" * 5000, "no model aaa"),
    ],
)
def test_missing_model_is_named(spec, message):
    with pytest.raises(UsageError, match=message):
        load_model(spec, device=CPU)


def test_folder_without_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no model"):
        load_model(str(tmp_path), device=CPU)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="is no model: give its folder"):
        load_model(str(tmp_path / "a.bin"), device=CPU)


def test_unknown_name_is_searched_on_the_hub(monkeypatch):
    import huggingface_hub

    def offline(name, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UsageError, match=r"no model owner/name: .* hub gave none \(no network\)"):
        load_model("owner/name", device=CPU)


def test_model_of_the_hub_is_downloaded(monkeypatch, tiny_llama):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tiny_llama))
    assert load_model("owner/name", device=CPU).name == "owner/name"


def test_several_gguf_files_are_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"several models: name one of a\.gguf, b\.gguf"):
        load_model(str(tmp_path), device=CPU)


@pytest.mark.parametrize("name", ["", "a-00002-of-00003.gguf"])
def test_parts_of_a_gguf_file_are_named(tmp_path, name):
    for part in (1, 2, 3):
        (tmp_path / f"a-{part:05}-of-00003.gguf").touch()
    with pytest.raises(UsageError, match=rf"is part {2 if name else 1} of 3: join them with"):
        find_model(str(tmp_path / name))


def test_a_damaged_gguf_file_is_refused(tmp_path):
    pytest.importorskip("gguf", reason="GGUF files need flexq-bench[accuracy]")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(UsageError, match=r"can't read .*a\.gguf \(.*download it again"):
        load_model(str(tmp_path / "a.gguf"), device=CPU)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_unreadable_file_is_reported_as_permission_denied(folder, monkeypatch, name):
    opened = Path.open

    def guarded(path, *arguments, **options):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", guarded)
    with pytest.raises(UsageError, match=rf"can't read .*{name}.*ermission denied") as raised:
        load_model(str(folder), device=CPU)
    assert "\n" not in str(raised.value)


def test_unreadable_folder_is_named(folder, monkeypatch):
    def guarded(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", guarded)
    with pytest.raises(UsageError, match=r"can't read .*model: permission denied"):
        load_model(str(folder), device=CPU)
