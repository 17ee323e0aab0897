"""`gate accuracy --reference`: files against the original, in memory and stored."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.accuracy.agreement import Agreement
from flexq_bench.accuracy.diagnosis import worst_tokens
from flexq_bench.accuracy.perplexity import segments
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.exit_codes import ExitCode

POLICY = """
version = 1
schemes = ["flexq-w6ax"]
detect = 1.0
[[perplexity]]
text = "heldout"
[kl]
text = "heldout"
mean = 0.006
p99 = 0.05
[agreement]
text = "heldout"
top1 = 0.93
[fidelity]
text = "heldout"
percent = 0.4
kl_percent = 8
kl = 0.0002
"""


def flip(weights, layer):
    weights[f"model.layers.1.{layer}.weight"].neg_()


def zero_a_head(weights):
    weights["model.layers.1.self_attn.o_proj.weight"][:, :32] = 0


def round_a_block(weights):
    for name, weight in weights.items():
        if name.startswith("model.layers.1.") and weight.ndim == 2:
            scale = weight.abs().amax(1, keepdim=True) / 3
            weight.copy_((weight / scale).round().clamp(-4, 3) * scale)


def add_noise(weights):
    for weight in weights.values():
        if weight.ndim == 2:
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            weight += 0.03 * weight.float().std() * noise


DAMAGES = {
    "a down_proj's sign flipped": lambda weights: flip(weights, "mlp.down_proj"),
    "a k_proj's sign flipped": lambda weights: flip(weights, "self_attn.k_proj"),
    "a head zeroed": zero_a_head,
    "a block of 3 bits": round_a_block,
    "noise of 3 %": add_noise,
}


@pytest.fixture
def made(tiny_llama, tmp_path):
    """made(damage): a copy of tiny-llama's folder, FP32, after `damage(weights)`.

    config: settings of config.json that are others.
    """

    def make(damage=None, **config):
        folder = tmp_path / "made"
        shutil.copytree(tiny_llama, folder)
        weights = {n: w.float() for n, w in load_file(tiny_llama / "model.safetensors").items()}
        if damage is not None:
            damage(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return make


@pytest.fixture
def gate(cli, tiny_llama, tmp_path):
    def run(model, *options, policy=POLICY, reference=tiny_llama):
        path = tmp_path / "mine.toml"
        path.write_text(policy)
        where = ("--model", str(model), "--policy", str(path), "--device", "cpu")
        data = ("--data", str(tiny_llama / "heldout.txt"), "--reference", str(reference))
        told = ("--no-diagnosis", "--json", "-")
        return cli("gate", "accuracy", *where, *data, *told, *options)

    return run


@pytest.fixture(scope="module")
def stored_reference(tiny_llama, tmp_path_factory):
    """tiny-llama's predictions, in a file."""
    from flexq_bench.cli.app import main

    folder = tmp_path_factory.mktemp("stored")
    path = folder / "tiny.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXQ_BENCH_DB", str(folder / "flexq.sqlite"))
        where = ("--model", str(tiny_llama), "--data", str(tiny_llama / "heldout.txt"))
        saving = ("--schemes", "fp16", "--device", "cpu", "--save-reference", str(path))
        assert main(("accuracy", *where, *saving)) == ExitCode.PASS
    return path


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_weights_fail_against_the_stored_reference(gate, made, stored_reference, damage):
    ran = gate(made(damage), reference=stored_reference)
    assert ran.code == ExitCode.REGRESSION, ran.out + ran.error


@pytest.mark.slow
def test_wrong_rotary_base_fails_and_is_named(gate, made):
    rope = {"rope_theta": 20000.0, "rope_type": "default"}
    ran = gate(made(rope_parameters=rope), "--diagnosis")
    assert ran.code == ExitCode.REGRESSION, ran.out + ran.error
    (found,) = json.loads(ran.out)["diagnoses"]
    assert any(line.startswith("rope_parameters: ") for line in found["differing"])


def test_undamaged_copy_passes_at_the_minimum(gate, made, stored_reference):
    """In FP32, where the original is FP16."""
    ran = gate(made(), reference=stored_reference)
    assert ran.code == ExitCode.PASS, ran.out + ran.error
    found = json.loads(ran.out)
    assert found["reference_hash"] != found["model_hash"]
    checks = {check["check"]: check for check in found["checks"]}
    assert checks["KL mean of heldout"]["value"] < 1e-6
    assert checks["perplexity of heldout"]["reason"].startswith("15,300 tokens show a loss of 1 %")


def test_failing_gate_stores_the_worst_layers_and_tokens(gate, made, tmp_path):
    ran = gate(made(DAMAGES["a down_proj's sign flipped"]), "--diagnosis")
    (found,) = json.loads(ran.out)["diagnoses"]
    first = found["layers"][0]
    assert first["layer"] == "model.layers.1.mlp.down_proj"
    assert first["error"] == pytest.approx(4)  # (-y - y)² / y²
    assert first["kl_restored"] < 1e-6 < found["kl"]
    assert found["tokens"][0]["loss"] > found["tokens"][-1]["loss"] > 0
    with open_database(str(tmp_path / "flexq.sqlite")) as database, database.session() as session:
        (row,) = queries.gate_history(session, "made", limit=9)
    assert (row.scheme, row.base, row.reference) == ("fp16", "reference", "tiny-llama")
    assert row.diagnosis["layers"][0]["layer"] == first["layer"]


def test_another_tokenizer_fails(gate, made):
    folder = made()
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    moved = {word: words[(i + 1) % len(words)][1] for i, (word, _) in enumerate(words)}
    tokenizer["model"]["vocab"] = moved
    path.write_text(json.dumps(tokenizer))
    ran = gate(folder)
    assert ran.code == ExitCode.REGRESSION
    reasons = {check["reason"] for check in json.loads(ran.out)["checks"]}
    assert any("reads the text as other tokens than that of tiny-llama" in r for r in reasons)


def test_a_damaged_stored_reference_is_refused(gate, tiny_llama, stored_reference, tmp_path):
    path = tmp_path / "bad.safetensors"
    content = bytearray(stored_reference.read_bytes())
    content[-9] ^= 64
    path.write_bytes(content)
    ran = gate(tiny_llama, reference=path)
    assert ran.code == ExitCode.USAGE
    assert "is not what its content hash says" in ran.error


def test_too_few_tokens_are_missing_with_the_needed_number(gate, made, stored_reference):
    policy = POLICY.replace("detect", "max_tokens = 510\ndetect")
    ran = gate(made(), reference=stored_reference, policy=policy)
    assert ran.code == ExitCode.MISSING
    (reason,) = {c["reason"] for c in json.loads(ran.out)["checks"] if c["outcome"] == "not judged"}
    assert reason.startswith("needs 15,300 tokens, has 510")


def test_duplicate_segments_do_not_count(cli, tiny_llama, tmp_path):
    text = (tiny_llama / "heldout.txt").read_text()
    # 512 tokens, again and again: each segment of 256 is one of two
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = tokenizer(text).input_ids[:512]
    part = tokenizer.decode(ids)
    assert tokenizer(part * 2).input_ids == ids * 2
    repeated, policy = tmp_path / "heldout.txt", tmp_path / "mine.toml"
    repeated.write_text(part * 10)
    policy.write_text(POLICY.partition("[kl]")[0])
    ran = cli(
        *("gate", "accuracy", "--model", str(tiny_llama), "--scheme", "w6a6", "--device", "cpu"),
        *("--policy", str(policy), "--data", str(repeated), "--json", "-"),
    )
    assert ran.code == ExitCode.MISSING
    assert "in addition to 18 duplicate segments" in json.loads(ran.out)["checks"][0]["reason"]


def test_failing_scheme_does_not_stop_the_others(gate, made):
    def outlier(weights):
        weights["model.layers.0.mlp.gate_proj.weight"][0, 0] = 3e7  # its scale passes FP16

    policy = POLICY.replace("detect = 1.0", "max_tokens = 255").partition("[kl]")[0]
    policy = policy.replace('"heldout"\n', '"heldout"\npercent = 500\n')
    ran = gate(made(outlier), "--scheme", "w6a6,w8a16", policy=policy)
    judged = {c["scheme"]: c for c in reversed(json.loads(ran.out)["checks"])}
    assert ran.code == ExitCode.REGRESSION
    assert set(judged) == {"fp16", "w6a6", "w8a16"}
    assert "FP16" in judged["w6a6"]["reason"]
    assert judged["fp16"]["value"] is not None


@pytest.mark.parametrize("bos", [None, 99])
def test_worst_token_has_its_place_in_the_text(bos):
    text = torch.arange(24)  # the token at each place is the place
    cut = torch.stack(list(segments(text, 6, bos=bos)))
    losses = np.random.default_rng(0).random((len(cut), 5), dtype=np.float32)
    agreement = Agreement((), (), (), (), losses, losses)
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    losses = worst_tokens(agreement, cut, tokenizer, bos=bos is not None)

    assert len(losses) > 5
    assert [loss.token for loss in losses] == [str(loss.place) for loss in losses]
