"""Statistics of interleaved A/B blocks: estimate, bounds and p-value, alone and together.

Thresholds, and what numbers mean, are in `flexq_bench.verdicts.alert_rule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from flexq_bench.stats.log_series import Floats
from flexq_bench.verdicts.alert_rule import (
    CLOCK_TOLERANCE,
    CONFIDENCE,
    FALSE_DISCOVERY_RATE,
    FEWEST_BLOCKS,
    FEWEST_PLACEMENTS,
    SHARE_SIGNIFICANCE,
    smallest_change,
    verdict_of,
)
from flexq_bench.verdicts.process_modes import ProcessModes, process_modes
from flexq_bench.verdicts.verdict import Cause, Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """Interleaved blocks of two commits: index i is the same ABBA block.

    base_us, head_us: [blocks], microseconds. placement: [blocks], equal where blocks share what
    sets them apart from others: the buffers, or the pair of processes where each commit has its
    own. base_mhz, head_mhz: [blocks] SM clocks; None: unknown. noise_floor: ln, the smallest step
    that this series' own A/A runs let us see. correct: both results were right. same_binary: both
    commits compiled to the same machine code.
    """

    base_us: ArrayLike
    head_us: ArrayLike
    placement: ArrayLike
    base_mhz: ArrayLike | None = None
    head_mhz: ArrayLike | None = None
    noise_floor: float = 0.0
    correct: bool = True
    same_binary: bool = False


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A verdict and what it rests on.

    log_ratio: ln(head / base), positive is slower. low, high: its one-sided 99 % bounds.
    p_value: two-sided, of no change. smallest_change: ln, what had to be exceeded.
    All are NaN where nothing was judged.
    """

    verdict: Verdict
    cause: Cause
    reason: str
    log_ratio: float
    low: float
    high: float
    p_value: float
    smallest_change: float
    blocks: int
    placements: int
    modes: ProcessModes | None = None


def confirm(comparison: Comparison) -> Confirmation:
    """The verdict on one comparison, with placement as a random effect.

    Blocks of one placement are not independent: the unit is a placement's mean log ratio, their
    spread gives Student's t bounds. slower: the estimate is at least the larger of 1 % and the
    noise floor, and its lower bound is above 0. faster: the mirror image. same: both bounds are
    within the smallest change. Otherwise ambiguous: more placements would tell. Where processes run
    at either of two speeds (`process_modes`), fast ones are compared with fast ones and slow ones
    with slow ones, and a change of how many are slow is a verdict of its own if the mean of all
    changes by as much.
    no-data: fewer than 10 blocks or 5 placements are left without those that are not positive
    numbers or whose clocks disagree by more than 1 %. Raises ValueError if lengths differ.
    """
    usable, discordant = _usable(comparison)
    ratios, placement = _ratios(comparison, usable), np.asarray(comparison.placement)[usable]
    means = np.array([ratios[placement == label].mean() for label in np.unique(placement)])
    if not comparison.correct:
        return _undecided(Verdict.INCORRECT, "a result is wrong", ratios.size, means.size)
    if ratios.size < FEWEST_BLOCKS or means.size < FEWEST_PLACEMENTS:
        reason = (
            f"{ratios.size} blocks over {means.size} placements can be used, "
            f"{FEWEST_BLOCKS} over {FEWEST_PLACEMENTS} are needed"
        )
        if discordant:
            reason += f"; in {discordant} the clocks of the two disagree"
        return _undecided(Verdict.NO_DATA, reason, ratios.size, means.size)

    smallest = smallest_change(comparison.noise_floor)
    modes = process_modes(*placement_sides(comparison))
    estimate, low, high, p_value = _student(means) if modes is None else _within(modes)
    verdict = verdict_of(estimate, low, high, smallest)
    reason = _reason(verdict, estimate, low, high)
    if modes is not None:
        reason = f"{reason}; {modes.in_words}"
        overall, *bounds, _ = _student(means)
        is_settled = verdict in (Verdict.SLOWER, Verdict.FASTER)
        if not is_settled and modes.p_value < SHARE_SIGNIFICANCE and abs(overall) >= smallest:
            # Each speed may be what it was: that more of the processes are slow is slower.
            verdict = Verdict.SLOWER if overall > 0 else Verdict.FASTER
            estimate, (low, high) = overall, bounds
            p_value = modes.p_value
    cause = Cause.NONE
    if verdict in (Verdict.SLOWER, Verdict.FASTER):
        cause = Cause.CODE
        if comparison.same_binary:
            cause, reason = Cause.ENVIRONMENT, f"{reason}, with the same machine code"
    return Confirmation(
        verdict,
        cause,
        reason,
        estimate,
        low,
        high,
        p_value,
        smallest,
        ratios.size,
        means.size,
        modes,
    )


def confirm_together(
    confirmations: Sequence[Confirmation], *, rate: float = FALSE_DISCOVERY_RATE
) -> tuple[Confirmation, ...]:
    """Confirmations that are judged together, such as a nightly run's, in the order given.

    Benjamini and Hochberg (1995) over all that have a p-value: where many are tried, slower and
    faster need a smaller one, and what does not have it becomes ambiguous. Where nothing changed,
    the chance of any false verdict among them is at most `rate`.
    """
    from scipy import stats  # half a second: only those who judge pay it

    judged = [i for i, one in enumerate(confirmations) if np.isfinite(one.p_value)]
    if not judged:
        return tuple(confirmations)
    adjusted = stats.false_discovery_control([confirmations[i].p_value for i in judged])
    result = list(confirmations)
    for i, p_value in zip(judged, adjusted, strict=True):
        if p_value > rate and result[i].verdict in (Verdict.SLOWER, Verdict.FASTER):
            reason = f"{result[i].reason}, but not beyond chance among {len(judged)} comparisons"
            result[i] = replace(
                result[i], verdict=Verdict.AMBIGUOUS, cause=Cause.NONE, reason=reason
            )
    return tuple(result)


def usable_blocks(comparison: Comparison) -> tuple[Floats, np.ndarray, int]:
    """Log ratios [blocks], their placements [blocks], and how many were left out for their clocks.

    Raises ValueError if lengths differ.
    """
    usable, discordant = _usable(comparison)
    return _ratios(comparison, usable), np.asarray(comparison.placement)[usable], discordant


def _ratios(comparison: Comparison, usable: np.ndarray) -> Floats:
    base = np.asarray(comparison.base_us, dtype=np.float64)[usable]
    ratios: Floats = np.log(np.asarray(comparison.head_us, dtype=np.float64)[usable] / base)
    return ratios


def placement_sides(comparison: Comparison) -> tuple[Floats, Floats]:
    """Mean ln of the time in each placement, [placements] of base and of head."""
    usable, _ = _usable(comparison)
    placement = np.asarray(comparison.placement)[usable]
    base, head = (
        np.log(np.asarray(side, dtype=np.float64)[usable])
        for side in (comparison.base_us, comparison.head_us)
    )
    labels = np.unique(placement)
    sides = [np.array([one[placement == at].mean() for at in labels]) for one in (base, head)]
    return sides[0], sides[1]


def _usable(comparison: Comparison) -> tuple[np.ndarray, int]:
    """Which blocks count, and how many were left out for their clocks."""
    base = np.asarray(comparison.base_us, dtype=np.float64)
    head = np.asarray(comparison.head_us, dtype=np.float64)
    placement = np.asarray(comparison.placement)
    if not base.shape == head.shape == placement.shape or base.ndim != 1:
        raise ValueError(
            "base, head and placement need one value a block, got shapes "
            f"{base.shape}, {head.shape} and {placement.shape}"
        )
    usable = np.isfinite(base) & np.isfinite(head) & (base > 0) & (head > 0)
    discordant = 0
    if comparison.base_mhz is not None and comparison.head_mhz is not None:
        clocks = np.asarray(comparison.base_mhz, dtype=np.float64)
        other = np.asarray(comparison.head_mhz, dtype=np.float64)
        if not clocks.shape == other.shape == base.shape:
            raise ValueError(f"clocks need one value a block, got {clocks.shape}, {other.shape}")
        apart = usable & (np.abs(other - clocks) > CLOCK_TOLERANCE * np.maximum(clocks, other))
        discordant = int(np.count_nonzero(apart))
        usable &= ~apart
    return usable, discordant


def _within(modes: ProcessModes) -> tuple[float, float, float, float]:
    """As `_student`, of processes in the same mode: strata weighted by what each one tells."""
    estimate, error, freedom = modes.difference()
    reach = float(special.stdtrit(freedom, CONFIDENCE)) * error
    if error == 0:
        return estimate, estimate, estimate, 1.0 if estimate == 0 else 0.0
    p_value = 2 * float(special.stdtr(freedom, -abs(estimate) / error))
    return estimate, estimate - reach, estimate + reach, p_value


def _student(means: Floats) -> tuple[float, float, float, float]:
    """Estimate, lower and upper bound, two-sided p-value of a mean that should be 0."""
    estimate = float(means.mean())
    error = float(means.std(ddof=1)) / float(np.sqrt(means.size))
    freedom = means.size - 1
    reach = float(special.stdtrit(freedom, CONFIDENCE)) * error
    if error == 0:
        return estimate, estimate, estimate, 1.0 if estimate == 0 else 0.0
    p_value = 2 * float(special.stdtr(freedom, -abs(estimate) / error))
    return estimate, estimate - reach, estimate + reach, p_value


def _reason(verdict: Verdict, estimate: float, low: float, high: float) -> str:
    change = (
        f"{np.expm1(estimate):+.2%}, 99 % bounds {np.expm1(low):+.2%} and {np.expm1(high):+.2%}"
    )
    return f"{change}: more placements would tell" if verdict is Verdict.AMBIGUOUS else change


def _undecided(verdict: Verdict, reason: str, blocks: int, placements: int) -> Confirmation:
    nan = float("nan")
    return Confirmation(verdict, Cause.NONE, reason, nan, nan, nan, nan, nan, blocks, placements)
