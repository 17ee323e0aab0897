"""The alert rule: from the results of a nightly run to an alert, and to the end of the alert.

All thresholds and decisions are in this file; statistics, storage and measurement are elsewhere.

1. Trigger. A result that differs from the history of its series (`outlier_limit`), a series that is
   slower than at the last release (`has_crept`), and a series of an open alert that is back near
   its good level (`is_near_good_level`) are candidates. No trigger opens an alert.
2. Comparison. Each candidate's commit is measured against a base, interleaved (ABBA) on one device:
   `PAIRS_OF_PROCESSES` fresh pairs of processes with `BLOCKS` blocks each, in up to `LOOKS` looks
   (`is_decided`), fewer for a clear change (`pairs_for_clear`). The base is a commit that trails
   the newest by some results (`db.queries.trusted_bases`), the release, or the last good commit of
   the alert. Its answer is remembered (`known_levels`): a confirmed change is no news in the nights
   after it, and a result that was the same is noise.
3. Verdict. A single comparison is judged by its estimate and 99 % bounds (`verdict_of`), all
   comparisons of a night together at a false discovery rate (`FALSE_DISCOVERY_RATE`).
4. Cause. The code or the machine, by the anchors measured in the same comparison (`attribute`).
5. Alert. Kernels that the code made slower or wrong (`is_worse`) open an alert, unless a commit was
   compared with itself. One alert is about one family of kernels and one range of commits
   (`Group`, `alert_of`).
6. End. An alert is open while the evidence of one of its series stands (`verdicts.standing`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flexq_bench.stats.log_series import SCALE_FLOOR, SMALLEST_LOG_RATIO, Floats
from flexq_bench.verdicts.verdict import Cause, Verdict
from flexq_bench.workloads.probes import calibrates

if TYPE_CHECKING:
    from flexq_bench.db.queries import AlertRow, CommitRow

# 1. Trigger. Changes are log ratios: ln(new / old), positive is slower.

HISTORY_RESULTS = 30  # accepted results of the same epoch with which a new one is compared
RECENT_RESULTS = 5  # the newest of them: they detect a step in a series that has two modes
FEWEST_FOR_SCALE = 5  # results; with fewer there is no sigma
TRIGGER_SIGMAS = 2.5  # of a prediction: the scale is a robust one (MAD, at least 0.2 %)
# ln. Without a comparison, a change of this size is compared at any noise: noise costs comparisons,
# but hides no change.
TRIGGER_ALWAYS = 0.018
# sigmas by which a result must exceed one that a comparison explained as noise: of a series with
# two levels no result exceeds the others by much
BEYOND_NOISE = 0.25
RELEASE_RESULTS = 5  # the newest up to the release, which define its level
FEWEST_AT_RELEASE = 3
CREEP_SIGMAS = 3.0  # standard errors of the difference of two medians


def outlier_limit(sigma: Floats, noise: Floats, farthest: Floats, always: float) -> Floats:
    """Return the ln from which a result differs enough from its history for a comparison.

    sigma: [...] of a prediction, ln; infinite: unknown. noise: [...] the largest distance in this
    direction of a result whose comparison found no change; farthest: in any direction; 0: there was
    none. always: limit at any noise, until comparisons show more.
    """
    by_sigma = np.minimum(TRIGGER_SIGMAS * sigma, always + farthest)
    beyond = np.where(noise > 0, noise + BEYOND_NOISE * np.minimum(sigma, always), 0.0)
    return np.asarray(np.maximum(by_sigma, beyond))


def has_crept(change: float, error: float) -> bool:
    """Return True if the level of a series differs from the last release's, by steps of any size.

    change: ln between the two medians. error: its standard error, ln.
    """
    return abs(change) >= max(SMALLEST_LOG_RATIO, CREEP_SIGMAS * error)


def has_crept_further(change: float, then: float) -> bool:
    """Return True if a series already compared with the release needs another comparison.

    change, then: ln of its time over the release's, now and at that comparison.
    """
    return change - max(then, 0.0) >= SMALLEST_LOG_RATIO


def is_near_good_level(latest: float, good: Sequence[float], bad: Sequence[float]) -> bool:
    """Return True if the latest time of a series with an open alert is nearer to its good level.

    good, bad: times up to the last good commit, and from the first bad one on; their medians are
    compared. True if either is empty: the series was incorrect then, so any time is new.
    """
    if not good or not bad:
        return True
    to_good, to_bad = (abs(math.log(latest / statistics.median(level))) for level in (good, bad))
    return to_good < to_bad


# 2. Comparison: how much is measured, and when it is enough.

PAIRS_OF_PROCESSES = 6  # in the first look
PLACEMENTS_A_PAIR = 1
BLOCKS = 2  # ABBA, on each placement
LOOKS = 3  # each of them doubles the pairs; they share the false discovery rate
# Before each look, at this share of its pairs, cases end that are neither slower nor faster, which
# spends none of that rate.
BEFORE_LOOK = 0.75
FEWEST_BLOCKS = 10
FEWEST_PLACEMENTS = 5
# A kernel may run at one of two speeds in each process. By chance, six pairs have one side slow and
# the other fast once in 2,000 comparisons, with narrow bounds; twelve pairs once in 8 million.
# A clear change (Confirmation.is_clear) needs fewer: see `pairs_for_clear`.
SURE_PLACEMENTS = 12
# Sides are far apart if the gap between them is so many times as wide as either of them.
FAR_GAPS = 4.0
# Relative. Blocks in which the clocks of the two sides differ by more are excluded. If too few
# remain, the bounds allow for the change that clocks can explain.
CLOCK_TOLERANCE = 0.01
# Part of the time of a measurement on CPUs in which its processes waited for one. Where others take
# more, only a clear change is slower or faster.
MAX_CPU_WAIT = 0.05


def is_decided(verdict: Verdict, placements: int, enough: int = SURE_PLACEMENTS) -> bool:
    """Return True if another look cannot change the verdict.

    enough: placements with which slower and faster are final.
    """
    if verdict in (Verdict.SLOWER, Verdict.FASTER):
        return placements >= enough
    return verdict is not Verdict.AMBIGUOUS


def pairs_for_clear(clear: int, compared: int, rate: float, *, is_far: bool = False) -> int:
    """Fewest pairs of processes with which `clear` clear changes of `compared` cases are final.

    rate: of false verdicts in one look. is_far: the sides are far apart (FAR_GAPS). If the
    processes of both sides are alike, whatever the distribution of their times, all n of one side
    are slower than all n of the other with a probability of at most 2 / C(2n, n) (the smallest
    p-value of Mann and Whitney 1947). Sides that are far apart have one speed each, of two, and
    then it is at most 2 / 4^n. This p-value must be small enough among all cases (Benjamini and
    Hochberg 1995), and as small as for a change of the number of slow processes. Not more than
    SURE_PLACEMENTS.
    """
    limit = min(SHARE_SIGNIFICANCE, rate * clear / compared)
    return next(
        (
            n
            for n in range(1, SURE_PLACEMENTS)
            if 2 / (4**n if is_far else math.comb(2 * n, n)) <= limit
        ),
        SURE_PLACEMENTS,
    )


# 3. Verdict.

CONFIDENCE = 0.99  # of each one-sided bound
FALSE_DISCOVERY_RATE = 0.015  # across the comparisons of a night
SHARE_SIGNIFICANCE = 1e-3  # of a change of the number of processes at the slower of two speeds
RATE_OF_ONE_LOOK = FALSE_DISCOVERY_RATE / LOOKS
# On CPUs a p-value counts so many times. Pairs of processes scatter there by more than what gates
# accept, so that what chance may find is beyond these limits, too; on a GPU it hardly is.
CPU_P_FACTOR = 10.0


def smallest_change(noise_floor: float) -> float:
    """The smallest ln that counts: 1 %, or the noise floor (ln) of the series if it is larger."""
    return max(SMALLEST_LOG_RATIO, noise_floor)


def verdict_of(estimate: float, low: float, high: float, smallest: float) -> Verdict:
    """Slower, faster, same or ambiguous, for one comparison alone.

    estimate, low, high: ln(head / base) and its one-sided 99 % bounds. smallest: ln, the smallest
    change that counts.
    """
    if estimate >= smallest and low > 0:
        return Verdict.SLOWER
    if estimate <= -smallest and high < 0:
        return Verdict.FASTER
    if -smallest < low and high < smallest:
        return Verdict.SAME
    return Verdict.AMBIGUOUS


# The name under which verdicts are stored. Raise the version with every change that can give the
# same evidence another verdict.
DETECTOR = "interleaved"
DETECTOR_VERSION = 8
RULE = (
    "slower or faster if the change is at least the smallest that counts and the 99 % "
    "bounds exclude no change, with a limited rate of false verdicts among the comparisons of a "
    "night; same if both bounds are within the smallest change; else ambiguous"
)
PARAMETERS: dict[str, Any] = {
    "confidence": CONFIDENCE,
    "smallest_change": SMALLEST_LOG_RATIO,
    "false_discovery_rate": RATE_OF_ONE_LOOK,
    "cpu_p_factor": CPU_P_FACTOR,
    "clock_tolerance": CLOCK_TOLERANCE,
    "max_cpu_wait": MAX_CPU_WAIT,
    "fewest_blocks": FEWEST_BLOCKS,
    "fewest_placements": FEWEST_PLACEMENTS,
    "share_significance": SHARE_SIGNIFICANCE,
}


# 4. Cause.


def attribute(
    kernel: float,
    *,
    floor: float | None,
    baseline: float | None,
    smallest: float = SMALLEST_LOG_RATIO,
) -> Cause:
    """Attribute a kernel's change to the code or the machine, by the anchors of the same
    comparison.

    All arguments are log changes between the same two commits: of the kernel, of the read-<bits>
    floor (memory) and of the baseline kernel (compute), which are the anchors; None: not measured.
    smallest: the smallest change that counts. none: the kernel did not change. code: the anchors
    did not change. environment: the kernel's change minus the mean of the anchors' is too small to
    count. both: it counts. unclear: there is no anchor, or the anchors contradict each other (only
    one of them changed, or they changed in opposite directions).
    """
    anchors = [change for change in (floor, baseline) if change is not None]
    if abs(kernel) < smallest:
        return Cause.NONE
    if not anchors:
        return Cause.UNCLEAR
    # Half of the smallest change that counts, and at least the scatter of blocks.
    moved = [abs(change) >= max(smallest / 2, SCALE_FLOOR) for change in anchors]
    if not any(moved):
        return Cause.CODE
    if not all(moved) or min(anchors) * max(anchors) < 0:
        return Cause.UNCLEAR
    machine = sum(anchors) / len(anchors)
    if abs(kernel - machine) < smallest:
        return Cause.ENVIRONMENT
    return Cause.BOTH


# 5. Alert.

# End of a kernel's name that is not part of its family: bits of weights and activations, or a type.
_BITS = re.compile(r"-(w[0-9*]+a[0-9*]+|[a-z]*[0-9]+)$")


def is_worse(verdict: Verdict, cause: Cause, kernel: str) -> bool:
    """Return True if the code made a kernel slower or incorrect.

    A slowdown that the environment explains does not count. Neither does a slower probe (read
    floor, empty kernel), which calibrates the other kernels.
    """
    if verdict is Verdict.INCORRECT:
        return True
    slower = verdict is Verdict.SLOWER and not calibrates(kernel)
    return slower and cause is not Cause.ENVIRONMENT


def kernel_family(kernel: str) -> str:
    """A kernel's name without its bit widths: `flexq-imma-w6a8` is of the family `flexq-imma`.

    A commit often changes a whole family. kernel: name without variant; variants belong to the same
    family.
    """
    return _BITS.sub("", kernel)


@dataclass(frozen=True, slots=True)
class Group:
    """Verdicts of one alert: something got worse in this family between these commits.

    members: uuids of their decisions.
    """

    family: str
    good: CommitRow
    bad: CommitRow
    members: tuple[str, ...]


def alert_of(group: Group, alerts: Sequence[AlertRow]) -> AlertRow | None:
    """The stored alert that a group belongs to; None: the group needs a new one.

    alerts: of the group's family. A range that somebody has decided about stays decided: a group of
    the same range joins its alert in any state. A group also joins an open alert if the two ranges
    share a commit, so that a later run does not report the same change again.
    """
    from flexq_bench.db.decisions import OPEN_STATES  # here, because a worker needs no SQLAlchemy

    for alert in alerts:
        same_base = alert.good is not None and alert.good.sha == group.good.sha
        if same_base and alert.bad.sha == group.bad.sha:
            return alert
    for alert in alerts:
        if alert.state in OPEN_STATES and _overlaps(group, alert):
            return alert
    return None


def _overlaps(group: Group, alert: AlertRow) -> bool:
    """Return True if the ranges (good, bad] share a commit, as far as their order is known.

    One of a branch, whose commits have no place on main, shares none with a range of main.
    """
    is_same_line = (alert.bad.topo_order is None) == (group.bad.topo_order is None)
    is_same_good = alert.good is not None and alert.good.sha == group.good.sha
    if alert.bad.sha == group.bad.sha or (is_same_good and is_same_line):
        return True
    good = 0 if alert.good is None else alert.good.topo_order
    orders = (good, alert.bad.topo_order, group.good.topo_order, group.bad.topo_order)
    if None in orders:
        return False
    alert_good, alert_bad, group_good, group_bad = (order or 0 for order in orders)
    return group_good < alert_bad and alert_good < group_bad


# 6. End: `flexq_bench.verdicts.standing`.

# Verdicts of a comparison with the last good commit that end an alert.
NOT_WORSE = (Verdict.SAME, Verdict.FASTER)
