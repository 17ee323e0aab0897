"""`gate accuracy` on damage that only a part of a text, or of all texts, shows."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from flexq_bench.accuracy.strata import shipped_text
from flexq_bench.exit_codes import ExitCode

LATE = 2600  # tokens: the gate stopped before, when it read a text from its beginning
HEAD = """
version = 1
schemes = ["fp16"]
detect = 1.0
"""
HELDOUT = HEAD + '[[perplexity]]\ntext = "heldout"\n'
EXAMPLES = """
[[perplexity]]
text = ["general", "maths"]
detect = 3.0
[tail]
text = "general"
percent = 10
[fidelity]
text = "rare"
percent = 0.4
kl_percent = 8
kl = 0.0002
"""


@pytest.fixture
def gate(cli, tiny_llama, tmp_path):
    """gate(weights, policy, *options): the report on a model of these weights against tiny-llama.

    With its own output head, because the embeddings may differ from it.
    """

    def run(weights, policy, *options):
        folder, path = tmp_path / "made", tmp_path / "mine.toml"
        shutil.copytree(tiny_llama, folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        path.write_text(policy)
        where = ("--model", str(folder), "--reference", str(tiny_llama), "--device", "cpu")
        ran = cli(
            *("gate", "accuracy", *where, "--policy", str(path), "--no-diagnosis", "--json", "-"),
            *options,
        )
        return ran, json.loads(ran.out)

    return run


@pytest.fixture
def weights(tiny_llama):
    read = {n: w.float() for n, w in load_file(tiny_llama / "model.safetensors").items()}
    return read | {"lm_head.weight": read["model.embed_tokens.weight"].clone()}


def exchange(weights, tokens, strength=1.0):
    """Give tokens a part of the embedding of the next one among them."""
    embedding = weights["model.embed_tokens.weight"]
    own = embedding[tokens].clone()
    embedding[tokens] = own + strength * (own.roll(1, 0) - own)


@pytest.mark.parametrize("strength", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_tokens_that_first_occur_late_are_judged(gate, weights, tiny_llama, strength):
    heldout = tiny_llama / "heldout.txt"
    ids = AutoTokenizer.from_pretrained(tiny_llama)(heldout.read_text()).input_ids
    late = sorted(set(ids[LATE:]) - set(ids[:LATE]))
    exchange(weights, late, strength)

    ran, report = gate(weights, HELDOUT, "--data", str(heldout))

    assert len(late) > 30
    assert ran.code == ExitCode.REGRESSION, ran.out
    assert report["checks"][0]["change"] > 2


@pytest.mark.slow
def test_undamaged_model_passes_on_shipped_texts(gate, weights):
    ran, report = gate(weights, HEAD + EXAMPLES)

    assert ran.code == ExitCode.PASS, ran.out
    coverage = {text["text"]: text for text in report["coverage"]}
    assert set(coverage) == {"general", "maths", "rare"}
    assert coverage["rare"]["vocabulary"] == coverage["rare"]["of_vocabulary"]
    assert 0 < coverage["general"]["tokens"] < coverage["general"]["of_tokens"]
    assert 1 < coverage["general"]["documents"] < coverage["general"]["of_documents"]


@pytest.mark.slow
def test_damage_to_digits_fails_maths_most(gate, weights, tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    exchange(weights, [tokenizer(digit).input_ids[0] for digit in "0123456789"])

    ran, report = gate(weights, HEAD + EXAMPLES.partition("[tail]")[0])

    assert ran.code == ExitCode.REGRESSION
    general, maths = report["checks"]
    assert maths["outcome"] == "fail"
    assert maths["change"] > 3 * abs(general["change"])


def counts_of_tokens(tiny_llama):
    """By text that ships, how often each token occurs, [vocabulary]."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    names = ("general", "code", "maths", "language")
    ids = {n: tokenizer(shipped_text(n).content, verbose=False).input_ids for n in names}
    return {name: np.bincount(own, minlength=len(tokenizer)) for name, own in ids.items()}


@pytest.mark.parametrize("text", ["code", pytest.param("language", marks=pytest.mark.slow)])
def test_damage_to_one_kind_of_text_alone_fails_there(gate, weights, tiny_llama, text):
    counts = counts_of_tokens(tiny_llama)
    shares = {name: count / count.sum() for name, count in counts.items()}
    others = np.max([share for name, share in shares.items() if name != text], axis=0)
    own = np.flatnonzero((shares[text] > 10 * others) & (counts[text] > 20))
    exchange(weights, own.tolist(), 0.3)
    limits = '[[perplexity]]\ntext = ["general", "code", "language"]\ndetect = 3.0\n'
    limits += f'[fidelity]\ntext = "{text}"\npercent = 0.4\nkl_percent = 8\nkl = 0.0002\n'

    ran, report = gate(weights, HEAD + limits)

    assert ran.code == ExitCode.REGRESSION
    failing = [check["check"] for check in report["checks"] if check["outcome"] == "fail"]
    assert failing
    assert all(name.endswith(f"of {text}") for name in failing)


@pytest.mark.slow
def test_damage_to_rare_tokens_alone_fails_the_rare_text(gate, weights, tiny_llama):
    times = sum(counts_of_tokens(tiny_llama).values())
    rarest = [token for token in np.argsort(times).tolist() if times[token]][:12]
    exchange(weights, rarest)

    ran, report = gate(weights, HEAD + EXAMPLES)

    assert ran.code == ExitCode.REGRESSION
    failing = [check["check"] for check in report["checks"] if check["outcome"] == "fail"]
    assert "fidelity of KL mean of rare" in failing
    assert not any(name.startswith("perplexity") for name in failing)


def test_text_of_the_policy_without_file_is_not_judged(gate, weights):
    ran, report = gate(weights, HEAD + '[[perplexity]]\ntext = ["chat", "code"]\n')

    assert ran.code == ExitCode.MISSING
    chat, code = report["checks"]
    assert (chat["outcome"], code["outcome"]) == ("not judged", "pass")
    assert "chat template" in chat["reason"]


@pytest.mark.slow
def test_policy_allows_that_a_text_is_not_judged(gate, weights):
    limits = 'allow_not_judged = ["* of chat"]\n[[perplexity]]\ntext = ["chat", "code"]\n'
    assert gate(weights, HEAD + limits)[0].code == ExitCode.PASS
