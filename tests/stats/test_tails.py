from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats import tail_excess


def test_tails_of_noise_are_equal():
    found = tail_excess(np.random.default_rng(0).normal(size=200))

    assert found.interval.low < 0 < found.interval.high


def test_loss_of_few_segments_exceeds_the_lower_tail():
    values = np.random.default_rng(0).normal(0, 0.01, 200)
    values[::20] += 0.2

    assert tail_excess(values).estimate == pytest.approx(0.18, abs=0.02)
    assert tail_excess(values).interval.low > 0.05
    assert tail_excess(-values).estimate == pytest.approx(-tail_excess(values).estimate)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        tail_excess([0.0, float("nan")])


def test_tail_of_neighbours_is_less_certain():
    """A loss that one stretch of the text carries is one piece of evidence."""
    scattered, together = (np.random.default_rng(0).normal(0, 0.01, 200) for _ in range(2))
    scattered[::20] += 0.2
    together[50:60] += 0.2

    found = tail_excess(scattered), tail_excess(together)

    assert found[0].reach(0.01) < 0.2 < found[1].reach(0.01)
