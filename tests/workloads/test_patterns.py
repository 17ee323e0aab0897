"""Which labels a pattern finds."""

from __future__ import annotations

import pytest

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.patterns import check_pattern, is_glob, matches, select

LABELS = ("abq-w2a8", "abq-w2*a8", "abq-w3a8", "abq-w8a8", "abq-w10a8", "flexq", "flexq[w6a8]")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("abq-w{2..8}a8", ("abq-w2a8", "abq-w3a8", "abq-w8a8")),
        ("abq-w{3..9}a{7..8}", ("abq-w3a8", "abq-w8a8")),
        ("*-w{10..10}*", ("abq-w10a8",)),
        ("flexq[w{5..6}a8]", ("flexq[w6a8]",)),
        ("abq-w{4..7}a8", ()),
        ("abq-w2*a8", ("abq-w2*a8",)),
        ("flexq*", ("flexq",)),  # variants only where they are asked for
        ("flexq*[*]", ("flexq[w6a8]",)),
        ("flexq[w6a8]", ("flexq[w6a8]",)),
        ("abq-w2*", ("abq-w2a8", "abq-w2*a8")),
        ("fp6-*", ()),
    ],
)
def test_pattern_selects_labels(pattern, found):
    assert select([pattern], LABELS) == found


def test_numbers_are_matched_whole():
    assert not matches("abq-w{1..1}a8", "abq-w10a8")
    assert not matches("abq-w{1..10}a8", "abq-w100a8")


def test_ranges_and_stars_are_globs_and_labels_are_not():
    assert is_glob("abq-w{2..8}a8")
    assert is_glob("abq*")
    assert not is_glob("flexq[w6a8]")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("abq-w{8..2}a8", "from low to high"), ("abq-w{2-8}a8", "written"), ("{2..", "written")],
)
def test_empty_range_is_refused(pattern, message):
    with pytest.raises(WorkloadError, match=message):
        check_pattern(pattern)


def test_of_many_names_one_line_lists_the_nearest():
    said = unknown("kernel", "k-77", [f"k-{number}" for number in range(100)])

    assert said.startswith("no kernel 'k-77': there are k-77, ")
    assert said.endswith(" and 84 more")
