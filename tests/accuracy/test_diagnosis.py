"""Diagnosis of a failing model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flexq_bench.accuracy.agreement import Agreement
from flexq_bench.accuracy.diagnosis import worst_tokens
from flexq_bench.accuracy.perplexity import segments

BOS = 99


@pytest.mark.parametrize("bos", [None, BOS])
def test_worst_token_has_its_place_in_the_text(bos):
    text = torch.arange(24)  # the token at each place is the place
    cut = torch.stack(list(segments(text, 6, bos=bos)))
    losses = np.random.default_rng(0).random((len(cut), 5), dtype=np.float32)
    agreement = Agreement((), (), (), (), losses, losses)
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    losses = worst_tokens(agreement, cut, tokenizer, bos=bos is not None)

    assert len(losses) > 5
    assert [loss.token for loss in losses] == [str(loss.place) for loss in losses]
