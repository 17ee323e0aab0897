"""`gate accuracy` of models that can't be loaded, and first opinions: exit codes and records."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.exit_codes import ExitCode

POLICY = """
version = 1
schemes = ["w8a16"]
max_tokens = 510
[[perplexity]]
text = "heldout"
percent = 1
[parity]
tolerance = 0.001
"""


def change_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = {name: weight.clone() for name, weight in load_file(path).items()}
    change(weights)
    save_file(weights, path, {"format": "pt"})


def put_nan(weights):
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan


def drop_tensor(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


BREAKS = {
    "NaN": lambda folder: change_weights(folder, put_nan),
    "missing tensor": lambda folder: change_weights(folder, drop_tensor),
    "32 positions": lambda folder: change_config(folder, max_position_embeddings=32),
    "other sizes": lambda folder: change_config(folder, hidden_size=96),
    "unknown type": lambda folder: change_config(folder, model_type="nonesuch"),
    "unreadable config": lambda folder: (folder / "config.json").write_text("{"),
    "cut off": cut_weights,
    "no tokenizer": lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
}


@pytest.fixture
def broken(tiny_llama, tmp_path):
    """broken("NaN"): a copy of tiny-llama's folder after that change."""

    def make(name):
        folder = tmp_path / "broken"
        shutil.copytree(tiny_llama, folder)
        BREAKS[name](folder)
        return folder

    return make


@pytest.fixture
def gate(cli, tiny_llama, tmp_path):
    def run(model, *options, policy=POLICY):
        path = tmp_path / "mine.toml"
        path.write_text(policy)
        where = ("--model", str(model), "--policy", str(path), "--device", "cpu")
        return cli("gate", "accuracy", *where, "--data", str(tiny_llama / "heldout.txt"), *options)

    return run


@pytest.fixture
def stored(tmp_path):
    """stored("tiny-llama"): the stored decisions on a model."""

    def of(model):
        path = str(tmp_path / "flexq.sqlite")
        with open_database(path) as database, database.session() as session:
            return queries.gate_history(session, model, limit=9)

    return of


@pytest.mark.parametrize("name", BREAKS)
def test_broken_model_fails_and_is_stored(gate, broken, stored, tiny_llama, name):
    ran = gate(broken(name), "--reference", str(tiny_llama))
    assert ran.code == ExitCode.REGRESSION, ran.out + ran.error
    assert ran.out.startswith("failed: 1 fail, ")
    (row,) = stored("broken")
    assert (row.verdict, row.exit_code, row.reference) == ("fail", 1, tiny_llama.name)
    assert {limit.check: limit.outcome for limit in row.limits} == {
        "model": "fail",
        "perplexity of heldout": "not judged",
        "parity of kernels": "not judged",
    }


def test_broken_model_without_reference_fails_its_schemes(gate, broken, stored):
    assert gate(broken("NaN")).code == ExitCode.REGRESSION
    assert [(row.scheme, row.verdict) for row in stored("broken")] == [("w8a16", "fail")]


def test_broken_reference_is_not_judged(gate, broken, stored, tiny_llama):
    ran = gate(tiny_llama, "--reference", str(broken("NaN")))
    assert ran.code == ExitCode.MISSING
    assert [row.verdict for row in stored("tiny-llama")] == ["not judged"]


def test_model_that_is_not_there_is_a_usage_error(gate, stored, tiny_llama, tmp_path):
    ran = gate(tmp_path / "nothing", "--reference", str(tiny_llama))
    assert ran.code == ExitCode.USAGE
    assert stored("nothing") == []


def test_first_opinion_never_passes_and_is_not_stored(gate, stored, tiny_llama):
    ran = gate(tiny_llama, "--quick", "--json", "-")
    found = json.loads(ran.out)
    assert ran.code == found["exit_code"] == ExitCode.MISSING
    assert found["headline"].startswith("no opinion yet: 2 not judged")
    assert found["counts"] == {"not judged": 2}
    assert stored("tiny-llama") == []


def test_first_opinion_fails_a_damaged_model(gate, tiny_llama, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_llama, folder)
    change_weights(folder, lambda weights: weights["model.layers.1.mlp.down_proj.weight"].neg_())
    ran = gate(folder, "--quick", "--reference", str(tiny_llama))
    assert ran.code == ExitCode.REGRESSION
    assert ran.out.startswith("failed at first sight: 1 fail")


def test_markdown_on_stdout_is_alone_there(gate, tiny_llama):
    ran = gate(tiny_llama, "--markdown", "-")
    assert ran.code == ExitCode.PASS, ran.error
    assert ran.out.startswith(
        "<!-- flexq-bench gate accuracy -->\n### Accuracy gate passed: 2 pass"
    )
    assert "────" not in ran.out
    assert "passed: 2 pass" in ran.error


def test_parity_takes_the_kernels_of_the_formats(gate, tiny_llama):
    """No kernel that earlier versions of the policy named multiplies 8 bits with FP16."""
    ran = gate(tiny_llama, "--json", "-")
    checks = {check["check"]: check for check in json.loads(ran.out)["checks"]}
    assert checks["parity of kernels"]["outcome"] == "pass"
    assert checks["parity of kernels"]["coverage"].startswith("17 of 17 layers, 1 to 512 tokens")


ABSOLUTE = POLICY.partition("[parity]")[0].replace("percent = 1", "at_most = 14.3\nincrease = 5")


@pytest.mark.slow
def test_absolute_limit_is_of_the_same_tokens_with_early_stops(gate, tiny_llama):
    """A loss of 50 % is decided after 60 segments, of which the perplexity is another one."""
    values = set()
    for detect in ("", "detect = 50.0\n"):
        extent = f"context = 64\nmax_tokens = 5040\n{detect}"
        policy = ABSOLUTE.replace("max_tokens = 510\n", extent).replace("14.3", "18")
        ran = gate(tiny_llama, "--json", "-", policy=policy)
        checks = {check["check"]: check for check in json.loads(ran.out)["checks"]}
        absolute = checks["absolute perplexity of heldout"]
        assert absolute["coverage"] == "all 5,040 tokens"
        values.add(absolute["value"])
    assert len(values) == 1


def test_absolute_limit_is_not_judged_on_some_tokens(cli, gate, tiny_llama, tmp_path):
    path, data = tmp_path / "part.safetensors", str(tiny_llama / "heldout.txt")
    saving = ("--schemes", "fp16", "--max-tokens", "1275", "--save-reference", str(path))
    stored = cli("accuracy", "--model", str(tiny_llama), "--data", data, "--device", "cpu", *saving)
    assert stored.code == ExitCode.PASS, stored.error
    policy = ABSOLUTE.replace("max_tokens = 510\n", "")
    ran = gate(tiny_llama, "--reference", str(path), "--json", "-", policy=policy)
    outcomes = {check["check"]: check["outcome"] for check in json.loads(ran.out)["checks"]}
    assert outcomes["absolute perplexity of heldout"] == "not judged"
    assert outcomes["perplexity of heldout"] == "pass"
