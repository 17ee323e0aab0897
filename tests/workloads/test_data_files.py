"""Data files: what is wrong with one is said in one line with its place."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexq_bench.workloads.data_files import (
    Amount,
    Count,
    DataTable,
    Entries,
    Text,
    Texts,
    must_be,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError


class Part(DataTable):
    NAME_KEY: ClassVar[str] = "name"
    name: Text
    weight: Amount = 0.0


class Inner(DataTable):
    count: Count | None = None


class File(DataTable):
    part: Entries[Part] = ()
    inner: Inner | None = None
    names: Texts = ()
    side: Literal["left", "right"] = "left"
    color: Annotated[Literal["red", "blue"], must_be("red or blue")] = "red"
    pairs: tuple[tuple[int, int], ...] = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"part": []}, "a.toml: needs at least one [[part]]"),
        ({"part": 3}, "a.toml: part must be tables, each under [[part]], got 3"),
        ({"part": [3]}, "a.toml: part must be tables, each under [[part]], got [3]"),
        ({"part": [{}]}, "a.toml, part 1: name is missing"),
        (
            {"part": [{"name": "x"}, {"name": "y", "weight": -1}]},
            "a.toml, y: weight must be a number of at least 0, got -1",
        ),
        (
            {"part": [{"name": "x", "wait": 1}]},
            "a.toml, x: no key 'wait' here: the keys are weight, name",
        ),
        ({"inner": [{}]}, "a.toml: inner must be a table, under [inner], got [{}]"),
        ({"inner": {"count": 0}}, "a.toml, inner: count must be an integer of at least 1, got 0"),
        ({"names": ["a", ""]}, "a.toml: names must be a list of strings, got ['a', '']"),
        ({"side": "up"}, "a.toml: side: Input should be 'left' or 'right', got 'up'"),
        ({"color": "green"}, "a.toml: color must be red or blue, got 'green'"),
        ({"pairs": [3]}, "a.toml: pairs: Input should be a valid tuple, got 3"),
    ],
)
def test_message_names_file_entry_and_key(values, message):
    with pytest.raises(WorkloadError) as caught:
        validated(File, values, "a.toml")

    assert str(caught.value) == message


def test_misspelled_key_is_reported_before_missing_key():
    with pytest.raises(WorkloadError, match="no key 'nam' here"):
        validated(File, {"part": [{"nam": "x"}]}, "a.toml")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*File.model_fields, *Part.model_fields, "count"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def message_of(values):
    """What reading these values raises; empty: they are read."""
    try:
        validated(File, values, "a.toml")
    except WorkloadError as error:
        return str(error)
    return ""


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from([*File.model_fields, "x"]), VALUES, max_size=4))
def test_any_file_content_is_read_or_refused_with_location(values):
    assert message_of(values).startswith("a.toml") or not message_of(values)
