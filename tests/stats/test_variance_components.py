"""Variance components, also of unequal groups."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats.variance_components import variance_components

TRUE = (0.005, 0.003, 0.002)


def hierarchy(rng, *, keep=1.0, processes=30, placements=6, blocks=5):
    """Values and their process and placement, with the sigmas of TRUE."""
    shape = (processes, placements, blocks)
    values = (
        TRUE[0] * rng.standard_normal(shape[:1])[:, None, None]
        + TRUE[1] * rng.standard_normal(shape[:2])[:, :, None]
        + TRUE[2] * rng.standard_normal(shape)
    )
    kept = rng.random(shape) < keep
    process, placement, _ = np.indices(shape)
    return values[kept], [process[kept], placement[kept]]


@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_each_level_gets_its_own_sigma(keep):
    rng = np.random.default_rng(1)
    found = [variance_components(*hierarchy(rng, keep=keep)) for _ in range(40)]

    assert np.sqrt(np.mean(np.square(found), axis=0)) == pytest.approx(TRUE, rel=0.08)


def test_balanced_groups_give_the_textbook_estimate():
    values = np.array([[1.0, 3.0], [6.0, 8.0], [2.0, 4.0]])
    group = np.repeat([0, 1, 2], 2)

    between, within = variance_components(values.ravel(), [group])

    inner = values.var(axis=1, ddof=1).mean()
    assert within == pytest.approx(np.sqrt(inner))
    assert between == pytest.approx(np.sqrt(values.mean(axis=1).var(ddof=1) - inner / 2))


def test_groups_within_chance_have_no_variance():
    assert variance_components([1.0, 3.0, 1.0, 3.0], [[0, 0, 1, 1]]) == (0.0, pytest.approx(2**0.5))


def test_labels_count_within_their_coarser_group():
    rng = np.random.default_rng(2)
    values, (process, placement) = hierarchy(rng)

    unique = process * 1000 + placement
    assert variance_components(values, [process, placement]) == pytest.approx(
        variance_components(values, [process, unique])
    )


def test_level_with_a_single_group_is_nan():
    outer, inner = variance_components([1.0, 2.0, 4.0], [[7, 7, 7]])

    assert np.isnan(outer)
    assert inner == pytest.approx(np.std([1, 2, 4], ddof=1))


@pytest.mark.parametrize(("values", "labels"), [([1.0, 2.0], [0]), ([1.0, np.nan], [0, 0])])
def test_unequal_lengths_and_gaps_are_refused(values, labels):
    with pytest.raises(ValueError, match=r"one label a value|finite"):
        variance_components(values, [labels])
