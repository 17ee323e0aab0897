"""Placement of the BOS token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from flexq_bench.accuracy.bos import (
    TextTokens,
    as_bos,
    chosen_bos,
    first_tokens_warning,
    text_tokens,
)
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.texts import Text

TEXT = Text("made", "text", "def a(b): return b\n" * 40, "ab")
TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


@pytest.fixture
def plain():
    """A tokenizer that begins nothing with BOS."""
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def beginning(plain):
    """The same tokenizer, which begins texts with BOS, its token 0."""
    name = plain.bos_token
    plain.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, plain.bos_token_id)]
    )
    return plain


def test_bos_precedes_each_segment_if_the_tokenizer_adds_it(a_model, beginning):
    model = a_model(vocabulary=512)
    assert chosen_bos(None, beginning) == "segment"
    tokens = text_tokens(TEXT, beginning, "segment", 16)
    assert tokens.bos == beginning.bos_token_id
    found = perplexity(model, tokens.ids, context=16, bos=tokens.bos)
    losses = []
    for start in range(0, len(tokens.ids) - 14, 15):
        ids = torch.cat((torch.tensor([0]), tokens.ids[start : start + 15]))[None]
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert len(found.nll) == len(losses)


def test_bos_text_precedes_the_first_segment_only(beginning):
    alone = text_tokens(TEXT, beginning, "none", 16)
    whole = text_tokens(TEXT, beginning, "text", 16)
    assert whole.bos is None
    assert whole.ids.tolist() == [beginning.bos_token_id, *alone.ids.tolist()]


def test_no_bos_is_added_if_the_tokenizer_adds_none(plain):
    assert chosen_bos(None, plain) == "none"
    tokens = text_tokens(TEXT, plain, "none", 16)
    assert tokens.bos is None
    assert tokens.ids.tolist() == plain(TEXT.content).input_ids


def test_what_can_not_be_is_refused(plain):
    plain.bos_token = None
    with pytest.raises(AccuracyError, match="the tokenizer has no such token"):
        chosen_bos("segment", plain)
    with pytest.raises(AccuracyError, match="give segment, text, none"):
        as_bos("each")


class NeedsBos(torch.nn.Module):
    """Predicts the next token surely after BOS, and nothing without it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, **_):
        following = torch.nn.functional.one_hot(input_ids.roll(-1, dims=1), 512).float()
        sure = (input_ids[:, :1] == 0).float()[:, :, None]
        return type("Output", (), {"logits": 9 * following * sure})


def test_model_that_needs_bos_is_warned_about(a_model, plain):
    tokens = text_tokens(TEXT, plain, "none", 16)
    config = type("Config", (), {"bos_token_id": 0})
    warning = first_tokens_warning(NeedsBos(config), plain, tokens)
    assert "evaluate with --bos segment" in warning
    assert first_tokens_warning(a_model(vocabulary=512), plain, tokens) is None
    assert first_tokens_warning(NeedsBos(config), plain, TextTokens(tokens.ids, 0)) is None
