"""Texts that ship with the gate, and their planned samples."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest
import torch

from flexq_bench.accuracy.bos import text_tokens
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.sampling import covering_segments, sampled_order
from flexq_bench.accuracy.strata import CHAT, LONG, RARE, SHORT, STRATA, shipped_text
from flexq_bench.accuracy.texts import read_text
from flexq_bench.stats import MIN_VALUES


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return load_model(str(tiny_llama), device=torch.device("cpu")).tokenizer


def test_shipped_files_are_small_and_have_licences():
    folder = files("flexq_bench.accuracy").joinpath("shipped_texts")
    texts = [file for file in folder.iterdir() if file.name.endswith(".txt")]
    readme = folder.joinpath("README.md").read_text("utf-8")

    assert sum(len(file.read_bytes()) for file in texts) < 1_000_000
    assert all(file.name in readme for file in texts)


@pytest.mark.parametrize("name", set(STRATA) - {CHAT, RARE})
def test_every_stratum_has_segments_for_a_test(name, tokenizer):
    text = replace(shipped_text(name), seed=0)
    tokens = text_tokens(text, tokenizer, "none", 256)

    length = 256 if name == LONG else SHORT
    assert tokens.ids.numel() // length == tokens.places.size > MIN_VALUES


def test_sample_is_drawn_from_the_whole_text(tokenizer, tiny_llama):
    text = read_text(str(tiny_llama / "heldout.txt"))
    whole = text_tokens(text, tokenizer, "none", 64)
    sample = text_tokens(replace(text, seed=0), tokenizer, "none", 64)
    first = np.sort(sample.places[:MIN_VALUES])
    count = sample.places.size

    assert sorted(sample.places) == list(range(count))
    assert max(b - a for a, b in pairwise([0, *first, count])) < count / 6
    assert sample.in_order.equal(whole.ids[: count * 64])
    again = text_tokens(replace(text, seed=0), tokenizer, "none", 64)
    other = text_tokens(replace(text, seed=1), tokenizer, "none", 64)
    assert again.ids.equal(sample.ids)
    assert not other.ids.equal(sample.ids)


def test_beginning_of_a_sample_has_its_share_of_each_document():
    documents = np.repeat([0, 1, 2, 3], [400, 200, 100, 100])
    order = sampled_order(documents, "seed")

    assert np.abs(np.bincount(documents[order[:80]]) - [40, 20, 10, 10]).max() <= 1


def test_covering_segments_contain_every_token():
    rng = np.random.default_rng(0)
    segments = rng.zipf(1.5, size=(300, 32)).clip(max=499)
    inner = {int(i) for i in segments[:, 1:-1].ravel()}
    known = np.zeros(500, bool)

    chosen = covering_segments(segments, known, 1, 300)

    assert {int(i) for i in segments[chosen][:, 1:-1].ravel()} == inner
    assert len(chosen) < 200
    assert len(covering_segments(segments, ~known, 60, 300)) == 60


def test_rare_stratum_has_the_tokens_that_samples_lack(tokenizer):
    parts = [replace(shipped_text(name), seed=0) for name in ("general", "language")]
    rare = text_tokens(replace(shipped_text(RARE, parts), seed=0), tokenizer, "none", 256)
    texts = [text_tokens(part, tokenizer, "none", 256) for part in parts]
    sampled = torch.cat([tokens.ids[: MIN_VALUES * SHORT] for tokens in texts])
    occurring = torch.cat([tokens.ids for tokens in texts]).unique()

    assert torch.cat((sampled, rare.ids)).unique().equal(occurring)
    assert rare.vocabulary == (occurring.numel(), occurring.numel())


def test_conversations_need_a_chat_template(tokenizer):
    with pytest.raises(AccuracyError, match="chat template"):
        text_tokens(shipped_text(CHAT), tokenizer, "none", 256)


def test_conversations_are_rendered_by_the_template(tokenizer):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = template
    try:
        ids = text_tokens(replace(shipped_text(CHAT), name="rendered"), tokenizer, "none", 256).ids
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(ids[:400]).startswith("<system>You are a helpful assistant.<user>")
