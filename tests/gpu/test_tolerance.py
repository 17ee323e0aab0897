"""The tolerance of attention, with the decoder's kernel: honest draws are right, spoiled wrong."""

from __future__ import annotations

import pytest
from attention_draws import errors


@pytest.mark.parametrize("sharpness", [1, 8, 32])
@pytest.mark.parametrize("context", [2, 9, 300])
def test_draws_are_right_and_their_spoiled_results_wrong(context, sharpness):
    how = {"sharpness": sharpness, "device": "cuda"}
    assert not errors(range(200), context, factor=1.0, **how)
    assert errors(range(20), context, factor=1.03, **how) == list(range(20))
