from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats import tail_excess


def test_tails_of_noise_are_equal():
    found = tail_excess(np.random.default_rng(0).normal(size=200), seed=0)

    assert found.low < 0 < found.high


def test_loss_of_few_segments_exceeds_the_lower_tail():
    values = np.random.default_rng(0).normal(0, 0.01, 200)
    values[::20] += 0.2

    assert tail_excess(values, seed=0).estimate == pytest.approx(0.18, abs=0.02)
    assert tail_excess(values, seed=0).low > 0.05
    assert tail_excess(-values, seed=0).estimate == -tail_excess(values, seed=0).estimate


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        tail_excess([0.0, float("nan")], seed=0)
