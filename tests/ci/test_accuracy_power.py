"""Number of segments that a planned accuracy gate evaluates."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.ci.accuracy_gate.power import PowerSchedule
from flexq_bench.stats import MIN_VALUES

SEGMENTS = 200
POLICY = """
version = 1
schemes = ["w6a6"]
detect = 1.0
[[perplexity]]
text = "wikitext"
percent = 0.5
[kl]
text = "wikitext"
mean = 0.02
"""


@pytest.fixture
def taken(tmp_path):
    """taken(undecided, loss): segments after each step of an evaluation, and the parts of their
    errors that its looks at the other limits had. loss: nats of each segment."""
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    policy = load_accuracy_policy(str(path))

    def evaluate(undecided, loss=0.0, enough=SEGMENTS):
        shares = []

        def look(scheme, text, results, share):
            assert (scheme, text) == ("w6a6", "wikitext")
            shares.append(share)
            return undecided(results)

        segments = range(SEGMENTS)
        schedule = PowerSchedule(
            policy,
            lambda text: (segments, SEGMENTS),
            lambda text: segments,
            lambda text: 2048,
            lambda text: enough,
            look,
        )
        base, counts = np.linspace(2, 3, SEGMENTS), []
        while not counts or counts[-1] < SEGMENTS:
            done = counts[-1] if counts else 0
            head = base[:done] + (loss[:done] if np.ndim(loss) else loss)
            given = ("w6a6", "wikitext", base[:done], head)
            wanted = schedule.next_count(*given, lambda done=done: done)
            if wanted <= done:
                break
            counts.append(min(wanted, SEGMENTS))
        return counts, shares, schedule.share("w6a6", "wikitext", counts[-1])

    return evaluate


def test_text_that_failed_its_test_is_evaluated_no_further(taken):
    assert taken(lambda done: True, 0.1) == ([MIN_VALUES], [], MIN_VALUES / SEGMENTS)


def test_text_is_evaluated_until_no_limit_is_ambiguous(taken):
    counts, shares, last = taken(lambda done: done < 100)

    assert counts[0] == MIN_VALUES
    assert 100 <= counts[-1] < SEGMENTS
    assert all(before < after for before, after in pairwise(counts))
    assert shares[-1] == last
    assert sum(shares) == pytest.approx(counts[-1] / SEGMENTS)


# The test needs fewer than 100 segments, more, and far more than there are.
@pytest.mark.parametrize(
    ("deviation", "least", "most"), [(0.004, 60, 100), (0.009, 101, SEGMENTS), (9, 100, 100)]
)
def test_only_a_test_that_can_end_exceeds_enough(taken, deviation, least, most):
    losses = np.random.default_rng(0).normal(0.0075, deviation, SEGMENTS)
    assert least <= taken(lambda done: True, losses, enough=100)[0][-1] <= most


def test_text_ends_when_all_limits_are_decided(taken):
    assert taken(lambda done: False)[0] == [MIN_VALUES]


def test_looks_share_the_error_probability(taken):
    counts, shares, last = taken(lambda done: True)

    assert counts[-1] == SEGMENTS
    assert sum(shares) + last == pytest.approx(1)
    assert min(*shares, last) > 0


@pytest.mark.parametrize(("segments", "said"), [(40, "not pass"), (70, "or more"), (4000, None)])
def test_text_too_short_for_its_test_is_named_beforehand(tmp_path, segments, said):
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    schedule = PowerSchedule(
        load_accuracy_policy(str(path)),
        lambda text: (range(segments), segments),
        lambda text: range(segments),
        lambda text: 256,
        lambda text: segments,
        lambda *look: False,
    )

    warnings = list(schedule.short_texts(["wikitext"]))

    assert [said in warning for warning in warnings] == [True] * (said is not None)
    assert not list(schedule.short_texts([]))
