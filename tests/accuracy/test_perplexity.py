from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity, segment_count
from flexq_bench.accuracy.positions import first_positions
from flexq_bench.accuracy.texts import read_text, tokenize

SHARED = Path(__file__).parents[3] / "shared"
SMOLLM2 = SHARED / "models" / "smollm2-135m-instruct"


def plain_loop(model, tokens, context):
    """As people write it with transformers: the model's own loss, a mean over whole segments."""
    losses = []
    for start in range(0, len(tokens) - context + 1, context):
        ids = tokens[None, start : start + context]
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_perplexity_equals_that_of_a_plain_loop(a_model, some_tokens, dtype):
    model, tokens = a_model().to(dtype), some_tokens(200)
    found = perplexity(model, tokens, context=32)
    assert found.perplexity == pytest.approx(plain_loop(model, tokens, 32), rel=1e-5)
    assert len(found.nll) == 6  # 200 // 32; the last 8 tokens are left


def test_max_tokens_counts_predicted_tokens_of_whole_segments(a_model, some_tokens):
    whole = perplexity(a_model(), some_tokens(200), context=32)
    part = perplexity(a_model(), some_tokens(200), context=32, max_tokens=2 * 31)
    assert part.nll == pytest.approx(whole.nll[:2])
    assert part.tokens == 62
    assert segment_count(200, 32, max_tokens=1) == 1


def test_segments_together_equal_segments_alone(a_model, some_tokens):
    seen = []
    model, tokens = a_model(), some_tokens(200)
    alone = perplexity(model, tokens, context=32, at_once=1)
    together = perplexity(
        model, tokens, context=32, at_once=4, on_logits=lambda index, _: seen.append(index)
    )
    assert together.nll == pytest.approx(alone.nll, rel=1e-5)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_logits_passed_on_predict_the_next_token(a_model, some_tokens):
    seen = {}
    model, tokens = a_model(), some_tokens(64)
    found = perplexity(model, tokens, context=32, on_logits=seen.__setitem__)
    chosen = seen[1].log_softmax(-1).gather(1, tokens[33:64, None])
    assert -chosen.mean().item() == pytest.approx(found.nll[1], rel=1e-5)


def test_standard_error_follows_the_delta_method():
    found = PerplexityResult((1.0, 1.2, 1.4), context=8, seconds=1.0)
    assert found.standard_error == pytest.approx(math.exp(1.2) * 0.2 / math.sqrt(3))
    assert PerplexityResult((1.0,), context=8, seconds=1.0).standard_error is None


def test_huge_losses_have_infinite_perplexity():
    assert PerplexityResult((1e4,), context=8, seconds=1.0).perplexity == math.inf
    assert math.isnan(PerplexityResult((math.nan,), context=8, seconds=1.0).perplexity)


def test_a_text_shorter_than_a_segment_is_refused(a_model, some_tokens):
    with pytest.raises(AccuracyError, match="31 tokens are fewer than one segment of 32"):
        perplexity(a_model(), some_tokens(31), context=32)


def test_training_mode_is_restored(a_model, some_tokens):
    model = a_model().train()
    perplexity(model, some_tokens(64), context=32)
    assert model.training


def test_loss_is_reported_by_position(a_model, some_tokens):
    model, tokens = a_model(), some_tokens(600)
    found = perplexity(model, tokens, context=300)

    with torch.no_grad():
        logits = model(input_ids=tokens[None, 300:]).logits[0].log_softmax(-1)
    losses = [-float(logits[place - 1, tokens[300 + place]]) for place in range(1, 300)]
    assert first_positions(300) == (0, 128, 256)
    parts = [losses[:127], losses[127:255], losses[255:]]  # of positions 1 …, 128 …, 256 …
    assert found.by_position[1] == pytest.approx([sum(p) / len(p) for p in parts], rel=1e-4)
    assert first_positions(128) == (0,)
    assert first_positions(129) == (0, 128)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="SmolLM2 is not in shared/")
def test_smollm2_has_its_known_perplexity():
    pytest.importorskip("gguf", reason="GGUF files need flexq-bench[accuracy]")
    loaded = load_model(str(SMOLLM2), device=torch.device("cpu"))
    text = read_text(str(SHARED / "data" / "wikitext2" / "wiki.test.raw"))
    tokens = tokenize(text, loaded.tokenizer)
    assert tokens.numel() == 304_986
    found = perplexity(loaded.model, tokens, context=loaded.context(), max_tokens=8188)
    assert found.tokens == 8188
    assert found.perplexity == pytest.approx(24.15, abs=0.01)
