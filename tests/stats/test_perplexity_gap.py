from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats.perplexity_gap import gap_closed_interval


def rows(share: float, segments: int = 40, noise: float = 0.0):
    """Segments of a worse, a third and a better model, the third `share` of the way between."""
    rng = np.random.default_rng(1)
    hard = rng.normal(3.0, 0.3, segments)
    worse, better = hard + 0.1, hard
    perplexity = share * np.exp(better.mean()) + (1 - share) * np.exp(worse.mean())
    head = hard + np.log(perplexity) - hard.mean() + rng.normal(0, noise, segments)
    return worse, head, better


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0, 1.2])
def test_share_is_the_position_of_the_third_model(share: float) -> None:
    found = gap_closed_interval(*rows(share), seed=0)

    assert found is not None
    assert found.estimate == pytest.approx(share, abs=1e-9)
    assert found.low <= found.estimate <= found.high


def test_scatter_of_segments_widens_the_interval() -> None:
    calm = gap_closed_interval(*rows(0.7), seed=0)
    noisy = gap_closed_interval(*rows(0.7, noise=0.02), seed=0)

    assert calm is not None
    assert noisy is not None
    assert noisy.high - noisy.low > 2 * (calm.high - calm.low)


def test_no_gap_gives_no_share() -> None:
    worse, head, better = rows(0.5)

    assert gap_closed_interval(better, head, worse, seed=0) is None
    assert gap_closed_interval(better, head, better, seed=0) is None


@pytest.mark.parametrize("bad", [[1.0, 2.0, 3.0], [1.0], [1.0, np.nan]])
def test_rows_of_different_lengths_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rows|finite"):
        gap_closed_interval([1.0, 2.0], bad, [0.5, 1.0], seed=0)
