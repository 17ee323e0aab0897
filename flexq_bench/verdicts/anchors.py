"""Fixed points that history lacks: the last release, the floor, a frozen baseline kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.series import SCALE_FLOOR, positive_logs, robust_scale
from flexq_bench.verdicts.confirmation import SMALLEST_CHANGE
from flexq_bench.verdicts.history_trigger import Trigger
from flexq_bench.verdicts.verdict import Cause, Verdict

_FEWEST_AT_RELEASE = 3
_RECENT = 5
_SIGMAS = 3.0


def creep(at_release: ArrayLike, since: ArrayLike) -> Trigger:
    """Whether the level has moved away from the last release's, however small each step was.

    at_release: [n >= 3] accepted results of the release, or around it before anything changed.
    since: [m >= 3] later ones, oldest first; the newest 5 count. Any unit, one epoch.
    candidate: their medians are at least 1 % and 3 standard errors apart; confirm it against the
    release's commit. The window of `trigger` creeps along and never sees this.
    """
    release, _ = positive_logs(at_release)
    later, _ = positive_logs(since)
    later = later[-_RECENT:]
    if min(release.size, later.size) < _FEWEST_AT_RELEASE:
        nan = float("nan")
        return Trigger(Verdict.NO_DATA, nan, nan, nan, release.size)
    change = float(np.median(later) - np.median(release))
    centered = np.concatenate([release - np.median(release), later - np.median(later)])
    # pi/2: the variance of a median over that of a mean, for Gaussian noise.
    error = float(robust_scale(centered)) * float(
        np.sqrt(np.pi / 2 * (1 / release.size + 1 / later.size))
    )
    apart = abs(change) >= max(SMALLEST_CHANGE, _SIGMAS * error)
    verdict = Verdict.CANDIDATE if apart else Verdict.SAME
    return Trigger(verdict, change / error, change, error, release.size)


def attribute(
    kernel: float,
    *,
    floor: float | None,
    baseline: float | None,
    smallest: float = SMALLEST_CHANGE,
) -> Cause:
    """Whether a kernel or its machine got slower or faster, from what was measured beside it.

    All are log changes between the same two runs: of the kernel, of the read-<bits> floor (memory)
    and of the frozen baseline kernel (compute); None: not measured. smallest: what counts.
    none: the kernel did not change. code: the anchors stayed. environment: what remains of the
    kernel's change beside the anchors' is too small to count. both: a change remains. unclear:
    no anchor, or they contradict each other (only one of them moved, or in opposite ways).
    """
    anchors = [change for change in (floor, baseline) if change is not None]
    if abs(kernel) < smallest:
        return Cause.NONE
    if not anchors:
        return Cause.UNCLEAR
    # Half of what counts, and never less than what blocks scatter by.
    moved = [abs(change) >= max(smallest / 2, SCALE_FLOOR) for change in anchors]
    if not any(moved):
        return Cause.CODE
    if not all(moved) or min(anchors) * max(anchors) < 0:
        return Cause.UNCLEAR
    machine = sum(anchors) / len(anchors)
    if abs(kernel - machine) < smallest:
        return Cause.ENVIRONMENT
    return Cause.BOTH
