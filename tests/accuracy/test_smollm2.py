"""A real model from a GGUF file, if it is in shared/."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.texts import read_text, tokenize

SHARED = Path(__file__).parents[3] / "shared"
MODEL = SHARED / "models" / "smollm2-135m-instruct"
TEXT = SHARED / "data" / "wikitext2" / "wiki.test.raw"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="SmolLM2 is not in shared/"),
]


def test_smollm2_has_its_known_perplexity():
    pytest.importorskip("gguf", reason="GGUF files need flexq-bench[accuracy]")
    loaded = load_model(str(MODEL), device=torch.device("cpu"))
    tokens = tokenize(read_text(str(TEXT)), loaded.tokenizer)
    assert tokens.numel() == 304_986
    found = perplexity(loaded.model, tokens, context=loaded.context(), max_tokens=8188)
    assert found.tokens == 8188
    assert found.perplexity == pytest.approx(24.15, abs=0.01)
