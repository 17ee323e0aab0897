from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.operation import MAX_DIMENSION
from flexq_bench.workloads.ranges import MAX_VALUES, PARAMETERS, in_sizes, parse_lines, parse_ranges


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", (7,)),
        ("1:4", (1, 2, 3, 4)),
        ("8:64:8", (8, 16, 24, 32, 40, 48, 56, 64)),
        ("4:64:x2", (4, 8, 16, 32, 64)),
        ("3:20:x2", (3, 6, 12)),
        ("8:20:8", (8, 16)),
        ("5:5:x2", (5,)),
        (" 1, 2 ,4:64:x2 ", (1, 2, 4, 8, 16, 32, 64)),
        (f"{MAX_DIMENSION}", (MAX_DIMENSION,)),
    ],
)
def test_each_form_means_what_it_says(text, values):
    assert parse_ranges(text) == values


def test_values_come_sorted_and_once():
    assert parse_ranges("8,1,8,4:8:x2,1:2") == (1, 2, 4, 8)


@given(st.lists(st.integers(1, MAX_DIMENSION), min_size=1, max_size=30))
def test_a_written_list_reads_back_as_its_set(values):
    assert parse_ranges(",".join(map(str, values))) == tuple(sorted(set(values)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "''"),
        ("1,,2", "''"),
        ("a", "'a'"),
        ("-1", "'-1'"),
        ("1.5", "'1.5'"),
        ("1:", "'1:'"),
        ("1:2:3:4", "'1:2:3:4'"),
        ("٣", "'٣'"),
        ("9" * 5000, "..."),
        ("0", "out of range: sizes are from 1 to 16,777,216"),
        ("0:4", "out of range: sizes are from 1 to 16,777,216"),
        (f"1:{MAX_DIMENSION + 1}", "out of range: sizes are from 1 to 16,777,216"),
        ("8:4", "runs backwards"),
        ("1:8:0", "at least 1"),
        ("1:8:x1", "at least x2"),
        ("1:8:x0", "at least x2"),
    ],
)
def test_invalid_size_is_refused(text, complaint):
    with pytest.raises(WorkloadError) as caught:
        parse_ranges(text)

    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_number_of_values_is_bounded():
    assert len(parse_ranges(f"1:{MAX_VALUES}")) == MAX_VALUES

    with pytest.raises(WorkloadError, match="has 10,001 values, at most 10,000"):
        parse_ranges(f"1:{MAX_VALUES},{MAX_VALUES + 1}")


def test_too_long_list_is_refused_before_splitting():
    with pytest.raises(WorkloadError, match="has 5,000,001 values") as caught:
        parse_ranges("x" + ",x" * 5_000_000)

    assert len(str(caught.value)) < 300


def test_file_items_are_separated_by_commas_or_spaces():
    assert parse_lines(["8, 1", "", " 2:4\t16,"], "sizes.txt") == (1, 2, 3, 4, 8, 16)


@pytest.mark.parametrize(
    "line", ["TOKEN=5ec3e7", "0.33", "424242424242", "7777:5555", "3131:9999:0"]
)
def test_file_error_names_the_line_without_quoting(line):
    with pytest.raises(WorkloadError) as caught:
        parse_lines(["1", f"4 {line}"], "sizes.txt")

    assert str(caught.value) == (
        "sizes.txt: line 2 contains something other than sizes and ranges from 1 to "
        "16,777,216: write 8, 1:8, 8:64:8 or 4:64:x2"
    )


def test_a_file_holds_a_bounded_number_of_values():
    with pytest.raises(WorkloadError, match=r"sizes\.txt has 20,000 values, at most 10,000"):
        parse_lines(["1:10000", "1:10000"], "sizes.txt")
    with pytest.raises(WorkloadError, match=r"sizes\.txt holds no size"):
        parse_lines(["", " "], "sizes.txt")


def test_parameters_may_be_zero_or_larger_than_sizes():
    assert parse_ranges("0,33554432", PARAMETERS) == (0, 33_554_432)
    assert in_sizes(1 << 30, "1024:")
