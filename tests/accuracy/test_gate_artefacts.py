"""`gate accuracy` on folders: artefacts, weights, and checkpoints of other tools."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from flexq_bench.exit_codes import ExitCode

POLICY = """
version = 1
schemes = ["flexq-w6ax"]
max_tokens = 2040
[fidelity]
text = "heldout"
percent = 0.4
kl_percent = 8
kl = 0.0002
[artefacts]
allow = {allow}
[weights]
"""
FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
UP = "model.layers.1.mlp.up_proj"
W8A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}


@pytest.fixture
def external(tiny_llama, tmp_path):
    """external(damage, cache): tiny-llama as llm-compressor writes it, W8A16.

    damage(codes, scales): of one layer's, in place. cache: factors of the scales of each block's
    FP8 keys; None: there is no such cache.
    """

    def write(damage=lambda codes, scales: None, cache=None):
        folder = tmp_path / "external"
        shutil.copytree(tiny_llama, folder)
        tensors = {}
        for name, weight in load_file(tiny_llama / "model.safetensors").items():
            layer = name.removesuffix(".weight")
            if not layer.endswith("_proj"):
                tensors[name] = weight
                continue
            scales = (weight.float().abs().amax(1, keepdim=True) / 127).half()
            codes = (weight.float() / scales.float()).round().clamp(-128, 127).to(torch.int8)
            if layer == UP:
                damage(codes, scales)
            tensors[f"{layer}.weight_packed"] = pack_to_int32(codes, 8)
            tensors[f"{layer}.weight_scale"] = scales
            tensors[f"{layer}.weight_shape"] = torch.tensor(weight.shape)
        for block, factor in enumerate(cache or ()):
            tensors[f"model.layers.{block}.self_attn.k_scale"] = torch.tensor([0.05 * factor])
            tensors[f"model.layers.{block}.self_attn.v_scale"] = torch.tensor([0.05])
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        section = W8A16 | ({} if cache is None else {"kv_cache_scheme": FP8_CACHE})
        config |= {"use_cache": False, "quantization_config": section}
        (folder / "config.json").write_text(json.dumps(config))
        settings = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 0}
        (folder / "generation_config.json").write_text(json.dumps(settings))
        return folder

    return write


@pytest.fixture
def gate(cli, tiny_llama, tmp_path):
    """gate("--checkpoint", folder, allow=[…]): exit code, and the outcome of each check."""

    def run(*options, allow=("no.difference",)):
        policy = tmp_path / "mine.toml"
        policy.write_text(POLICY.format(allow=json.dumps(list(allow))))
        ran = cli(
            *("gate", "accuracy", "--policy", str(policy), "--device", "cpu", "--no-diagnosis"),
            *("--data", str(tiny_llama / "heldout.txt"), "--json", "-", *map(str, options)),
        )
        assert ran.out.startswith("{"), ran.error
        return ran.code, {check["check"]: check for check in json.loads(ran.out)["checks"]}

    return run


def swap_and_scale(codes, scales):
    codes[[10, 20]] = codes[[20, 10]]
    scales[:6] *= 1.5


def test_healthy_checkpoint_of_another_tool_passes(gate, tiny_llama, external):
    code, checks = gate("--model", tiny_llama, "--checkpoint", external())
    assert code == ExitCode.PASS, checks
    assert {check["outcome"] for check in checks.values()} == {"pass"}
    assert len(checks) == 4


def test_damaged_checkpoint_of_another_tool_fails(gate, tiny_llama, external):
    folder = external(swap_and_scale)
    code, checks = gate("--model", tiny_llama, "--checkpoint", folder)
    assert code == ExitCode.REGRESSION
    assert checks["fidelity of KL mean of heldout"]["outcome"] == "fail"
    assert checks["weights"]["outcome"] == "fail"
    assert f"weights.{UP}: row 10 has the original's row 20" in checks["weights"]["reason"]


# Too large a scale costs E4M3 nothing until its values are subnormal, thousands of times later.
@pytest.mark.slow
@pytest.mark.parametrize(("factor", "outcome"), [(1, "pass"), (1 / 64, "fail"), (16384, "fail")])
def test_damaged_scale_of_the_cache_fails(gate, tiny_llama, external, factor, outcome):
    folder = external(cache=[1, factor, 1, 1])
    code, checks = gate("--model", tiny_llama, "--checkpoint", folder)
    assert checks["fidelity of KL mean of heldout"]["outcome"] == outcome
    assert (code == ExitCode.PASS) is (outcome == "pass"), checks


@pytest.mark.slow
def test_shifted_scales_fail_without_the_own_section(gate, tiny_llama, checkpoint, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["flexq_bench"]
    (folder / "config.json").write_text(json.dumps(config))
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        scales = tensors.get(f"{UP}.weight_scale")
        if scales is not None:
            scales[5] = scales[6]
        save_file(tensors, shard)
    code, checks = gate("--model", tiny_llama, "--checkpoint", folder)
    assert code == ExitCode.REGRESSION
    assert f"weights.{UP}: row 5" in checks["weights"]["reason"]


def test_changed_artefact_fails_unless_the_policy_allows_it(gate, tiny_llama, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama, folder)
    (folder / "generation_config.json").write_text('{"temperature": 9.0}')
    given = ("--model", folder, "--reference", tiny_llama)
    code, checks = gate(*given)
    assert code == ExitCode.REGRESSION
    assert "generation_config.temperature: 9.0" in checks["artefacts"]["reason"]
    code, checks = gate(*given, allow=["generation_config.*"])
    assert code == ExitCode.PASS, checks


def test_exchanged_embeddings_of_late_tokens_fail(gate, tiny_llama, tmp_path):
    """The gate's tokens have none of them: only the weights show the damage."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][[500, 501]] = tensors["lm_head.weight"][[501, 500]]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    code, checks = gate("--model", folder, "--reference", tiny_llama)
    assert code == ExitCode.REGRESSION
    assert "row 500 has the original's row 501" in checks["weights"]["reason"]
