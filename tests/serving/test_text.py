"""Text of tokens that come one at a time, and stop strings in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexq_bench.errors import UsageError
from flexq_bench.serving.loading import load_vocabulary
from flexq_bench.serving.text import GrowingText, StopStrings

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
VOCABULARY = load_vocabulary(TINY)


@given(st.text(max_size=40))
def test_growing_text_adds_up_to_the_whole(text):
    tokens, growing = VOCABULARY.tokens(text), GrowingText(VOCABULARY)

    parts = [growing.add(token) for token in tokens]

    assert all("\ufffd" not in part or "\ufffd" in text for part in parts)
    assert "".join(parts) + growing.end() == VOCABULARY.text(tokens)


def test_character_of_several_tokens_comes_with_its_last():
    tokens, growing = VOCABULARY.tokens("é"), GrowingText(VOCABULARY)
    assert len(tokens) == 2

    assert [growing.add(token) for token in tokens] == ["", "é"]
    assert growing.add(tokens[0]) == ""
    assert growing.end() == "\ufffd"


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_at_the_first_in_any_partition(parts, strings):
    whole = "".join(parts)
    stops, shown, is_stopped = StopStrings(strings), "", False

    for part in parts:
        text, is_stopped = stops.add(part)
        shown += text
        if is_stopped:
            break
    shown += stops.end()

    ends = [place + len(s) for s in strings if (place := whole.find(s)) >= 0]
    assert is_stopped == bool(ends)
    if is_stopped:
        assert not any(string in shown for string in strings)
        assert any(whole.startswith(shown + string) for string in strings)
    else:
        assert shown == whole


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(UsageError, match="Unicode"):
        VOCABULARY.tokens("\ud800")
