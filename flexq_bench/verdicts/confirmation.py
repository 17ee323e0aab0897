"""Statistics of interleaved A/B blocks: estimate, bounds and p-value, alone and together.

Thresholds and their meaning are in `flexq_bench.verdicts.alert_rule`.
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
    CPU_P_FACTOR,
    FALSE_DISCOVERY_RATE,
    FAR_GAPS,
    FEWEST_BLOCKS,
    FEWEST_PLACEMENTS,
    MAX_CPU_WAIT,
    SHARE_SIGNIFICANCE,
    SURE_PLACEMENTS,
    smallest_change,
    verdict_of,
)
from flexq_bench.verdicts.process_modes import ProcessModes, process_modes
from flexq_bench.verdicts.verdict import Cause, Verdict

SAME_CODE = "the same code in both commits"
CORRECTED = "a wrong result is corrected, so times are not compared"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Interleaved blocks of two commits: index i is the same ABBA block.

    base_us, head_us: [blocks], microseconds. placement: [blocks], equal for blocks with a common
    random effect: that of the buffers, or of the pair of processes if each commit has its own.
    base_mhz, head_mhz: [blocks] SM clocks; None: unknown. cpu_wait: part of the time in which the
    processes waited for a CPU; 0 on a GPU. noise_floor: ln, the smallest step that
    A/A runs of this series can detect. correct: no result was wrong, or base's alone if
    base_correct is False. same_binary: both commits compiled to the same machine code. same_code:
    nothing was measured, because the judging process found the same code in both commits.
    """

    base_us: ArrayLike
    head_us: ArrayLike
    placement: ArrayLike
    base_mhz: ArrayLike | None = None
    head_mhz: ArrayLike | None = None
    noise_floor: float = 0.0
    cpu_wait: float = 0.0
    correct: bool = True
    base_correct: bool = True
    same_binary: bool = False
    same_code: bool = False


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A verdict and the numbers behind it.

    log_ratio: ln(head / base), positive is slower. low, high: its one-sided 99 % bounds. p_value:
    two-sided, of no change; on CPUs CPU_P_FACTOR times that. smallest_change: ln, the limit that
    had to be exceeded. limited_by_clocks: ambiguous because of different clocks, so more placements
    do not help. is_clear: slower or faster, with both bounds beyond the smallest change, and every
    placement of one side slower than all of the other's, so two speeds of processes hardly explain
    it. is_far: the gap between the sides is FAR_GAPS times as wide as either. All numbers are NaN
    if nothing was judged.
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
    limited_by_clocks: bool = False
    is_clear: bool = False
    is_far: bool = False

    @property
    def stopped_early(self) -> bool:
        """Return True if the change is so clear that fewer placements than usual decided it."""
        is_changed = self.verdict in (Verdict.SLOWER, Verdict.FASTER)
        return is_changed and self.is_clear and self.placements < SURE_PLACEMENTS


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks with positive, finite times.

    base_us, head_us, placement: [blocks]. clock: [blocks], ln of base's SM clock over head's; 0 if
    they agree or are unknown. It is the largest part of ln(head / base) that the clocks can
    explain. left_out: number of other blocks, whose clocks disagree.
    """

    base_us: Floats
    head_us: Floats
    placement: np.ndarray
    clock: Floats
    left_out: int = 0

    @property
    def ratios(self) -> Floats:
        """ln(head / base), [blocks]."""
        logs: Floats = np.log(self.head_us / self.base_us)
        return logs

    @property
    def at_equal_clocks(self) -> Blocks:
        alike = self.clock == 0
        return Blocks(
            self.base_us[alike],
            self.head_us[alike],
            self.placement[alike],
            self.clock[alike],
            left_out=int(np.count_nonzero(~alike)),
        )

    @property
    def are_enough(self) -> bool:
        return self.ratios.size >= FEWEST_BLOCKS and self.labels.size >= FEWEST_PLACEMENTS

    @property
    def labels(self) -> np.ndarray:
        return np.unique(self.placement)

    def means(self, values: Floats) -> Floats:
        """Mean of values [blocks] in each placement, [placements]."""
        return np.array([values[self.placement == label].mean() for label in self.labels])

    def sides(self) -> tuple[Floats, Floats]:
        """Mean ln of the time in each placement, [placements] of base and of head."""
        return self.means(np.log(self.base_us)), self.means(np.log(self.head_us))


def confirm(comparison: Comparison, *, confidence: float = CONFIDENCE) -> Confirmation:
    """The verdict on one comparison, with placement as a random effect.

    confidence: of each one-sided bound.

    Blocks of one placement are not independent. The unit is therefore a placement's mean log ratio;
    the spread of these gives Student's t bounds. slower: the estimate is at least the larger of 1 %
    and the noise floor, and its lower bound is above 0. faster: the opposite. same: both bounds are
    within the smallest change. ambiguous: none of these, so more placements are needed. If
    processes run at one of two speeds (`process_modes`), fast processes are compared with fast ones
    and slow with slow ones. A change of the number of slow processes is then a verdict of its own,
    if the mean of all processes changes by as much. Where others take the CPUs, only a clear change
    is slower or faster.

    Blocks in which the clocks of the two sides differ by more than 1 % are excluded if enough
    others remain. Otherwise the bounds allow for the change that clocks can explain
    (`_at_unequal_clocks`). no-data: fewer than 10 blocks or 5 placements have positive numbers,
    or head corrects a wrong result of base.
    Raises ValueError if lengths differ.
    """
    blocks = judged_blocks(comparison)
    n_blocks, n_placements = blocks.ratios.size, blocks.labels.size
    if comparison.same_code and comparison.correct and not blocks.are_enough:
        return _undecided(Verdict.SAME, SAME_CODE, n_blocks, n_placements)
    if not comparison.correct:
        return _undecided(Verdict.INCORRECT, "a result is wrong", n_blocks, n_placements)
    if not comparison.base_correct:
        return _undecided(Verdict.NO_DATA, CORRECTED, n_blocks, n_placements)
    if not blocks.are_enough:
        reason = (
            f"{n_blocks} blocks over {n_placements} placements are usable, "
            f"{FEWEST_BLOCKS} over {FEWEST_PLACEMENTS} are needed"
        )
        return _undecided(Verdict.NO_DATA, reason, n_blocks, n_placements)
    judge = _at_unequal_clocks if blocks.clock.any() else _at_equal_clocks
    confirmed = judge(blocks, smallest_change(comparison.noise_floor), confidence)
    if comparison.cpu_wait > 0:
        confirmed = replace(confirmed, p_value=min(1.0, CPU_P_FACTOR * confirmed.p_value))
    if comparison.same_code and confirmed.verdict is Verdict.AMBIGUOUS:
        return replace(confirmed, verdict=Verdict.SAME, reason=f"{SAME_CODE}; {confirmed.reason}")
    if confirmed.verdict not in (Verdict.SLOWER, Verdict.FASTER):
        return confirmed
    if comparison.cpu_wait > MAX_CPU_WAIT and not confirmed.is_clear:
        reason = (
            f"{confirmed.reason}; not clear, and the processes waited for a CPU in "
            f"{comparison.cpu_wait:.0%} of the time"
        )
        return replace(confirmed, verdict=Verdict.AMBIGUOUS, reason=reason)
    if not comparison.same_binary:
        return replace(confirmed, cause=Cause.CODE)
    return replace(
        confirmed, cause=Cause.ENVIRONMENT, reason=f"{confirmed.reason}, with the same machine code"
    )


def _at_equal_clocks(blocks: Blocks, smallest: float, confidence: float) -> Confirmation:
    base, head = blocks.sides()
    modes = process_modes(base, head)
    means = blocks.means(blocks.ratios)
    estimate, low, high, p_value = (
        _student(means, confidence) if modes is None else _within(modes, confidence)
    )
    verdict = verdict_of(estimate, low, high, smallest)
    gap = float(max(head.min() - base.max(), base.min() - head.max()))
    is_clear = gap > 0 and (low > smallest or high < -smallest)
    reason = _reason(verdict, estimate, low, high, confidence)
    if is_clear and means.size < SURE_PLACEMENTS:
        reason = f"{reason}; clear after {means.size} pairs without overlap"
    if modes is not None:
        reason = f"{reason}; {modes.in_words}"
        overall, *bounds, _ = _student(means, confidence)
        is_settled = verdict in (Verdict.SLOWER, Verdict.FASTER)
        if not is_settled and modes.p_value < SHARE_SIGNIFICANCE and abs(overall) >= smallest:
            # Both speeds may be unchanged: more slow processes make the kernel slower.
            verdict = Verdict.SLOWER if overall > 0 else Verdict.FASTER
            estimate, (low, high) = overall, bounds
            p_value = modes.p_value
    return Confirmation(
        verdict,
        Cause.NONE,
        reason,
        estimate,
        low,
        high,
        p_value,
        smallest,
        blocks.ratios.size,
        means.size,
        modes,
        is_clear=is_clear,
        is_far=gap >= FAR_GAPS * float(max(np.ptp(base), np.ptp(head))),
    )


def _at_unequal_clocks(blocks: Blocks, smallest: float, confidence: float) -> Confirmation:
    """The verdict if too few blocks have both sides at one clock: a kernel may draw more power.

    A time grows at most in proportion to the fall of the clock. In each block ln(head / base) at
    equal clocks therefore lies between the measured value and this value minus the ln of the
    clocks' ratio. Each bound is Student's t at its own end of these ranges; the estimate is the
    measured value. Slower and faster need a change that counts at the end nearer to 0. Two speeds
    need no special treatment here: the bounds cover all processes together.
    """
    lowered, raised = np.maximum(blocks.clock, 0), np.minimum(blocks.clock, 0)
    fastest, low, _, p_slower = _student(blocks.means(blocks.ratios - lowered), confidence)
    slowest, _, high, p_faster = _student(blocks.means(blocks.ratios - raised), confidence)
    estimate = float(blocks.means(blocks.ratios).mean())
    nearest = max(fastest, 0.0) + min(slowest, 0.0)  # value nearest to 0 within all ranges
    p_value = p_slower if fastest > 0 else p_faster if slowest < 0 else 1.0
    verdict = verdict_of(nearest, low, high, smallest)
    # Limit of zero variance.
    limited = verdict_of(nearest, fastest, slowest, smallest) is Verdict.AMBIGUOUS
    apart = float(np.expm1(np.abs(blocks.clock).mean()))
    reason = _change(estimate, low, high, confidence)
    reason += f"; the clocks of the two sides differ by {apart:.1%}, which "
    if verdict is not Verdict.AMBIGUOUS:
        reason += "the bounds include"
    elif limited:
        reason += "can explain the change"
    else:
        reason += "the bounds include: more placements are needed"
    return Confirmation(
        verdict,
        Cause.NONE,
        reason,
        estimate,
        low,
        high,
        p_value,
        smallest,
        blocks.ratios.size,
        blocks.labels.size,
        limited_by_clocks=limited and bool(blocks.clock.all()),
    )


def confirm_together(
    confirmations: Sequence[Confirmation], *, rate: float = FALSE_DISCOVERY_RATE
) -> tuple[Confirmation, ...]:
    """Confirmations that are judged together, such as a nightly run's, in the order given.

    Benjamini and Hochberg (1995) over all that have a p-value. With more comparisons, slower and
    faster need a smaller p-value; those without become ambiguous. If nothing changed, the
    probability of any false verdict among them is at most `rate`.
    """
    judged = [
        i for i, confirmation in enumerate(confirmations) if np.isfinite(confirmation.p_value)
    ]
    if not judged:
        return tuple(confirmations)
    p_values = np.sort([confirmations[i].p_value for i in judged])
    shares = len(judged) / np.arange(1, len(judged) + 1)
    largest = p_values[p_values * shares <= rate].max(initial=-1.0)  # that is significant
    result = list(confirmations)
    for i in judged:
        is_chance = result[i].p_value > largest
        if is_chance and result[i].verdict in (Verdict.SLOWER, Verdict.FASTER):
            reason = f"{result[i].reason}, but not significant among {len(judged)} comparisons"
            result[i] = replace(
                result[i], verdict=Verdict.AMBIGUOUS, cause=Cause.NONE, reason=reason
            )
    return tuple(result)


def judged_blocks(comparison: Comparison) -> Blocks:
    """The blocks that a verdict is based on: those at equal clocks if they are enough, otherwise
    all.

    Raises ValueError if lengths differ.
    """
    blocks = _blocks(comparison)
    alike = blocks.at_equal_clocks
    return alike if alike.are_enough else blocks


def blocks_at_equal_clocks(comparison: Comparison) -> Blocks:
    """The blocks whose two sides ran at one clock. Raises ValueError if lengths differ."""
    return _blocks(comparison).at_equal_clocks


def _blocks(comparison: Comparison) -> Blocks:
    base = np.asarray(comparison.base_us, dtype=np.float64)
    head = np.asarray(comparison.head_us, dtype=np.float64)
    placement = np.asarray(comparison.placement)
    if not base.shape == head.shape == placement.shape or base.ndim != 1:
        raise ValueError(
            "base, head and placement need one value a block, got shapes "
            f"{base.shape}, {head.shape} and {placement.shape}"
        )
    clock = np.zeros(base.shape)
    if comparison.base_mhz is not None and comparison.head_mhz is not None:
        mine = np.asarray(comparison.base_mhz, dtype=np.float64)
        other = np.asarray(comparison.head_mhz, dtype=np.float64)
        if not mine.shape == other.shape == base.shape:
            raise ValueError(f"clocks need one value a block, got {mine.shape}, {other.shape}")
        apart = np.abs(other - mine) > CLOCK_TOLERANCE * np.maximum(mine, other)  # false for NaN
        clock[apart] = np.log(mine[apart] / other[apart])
    usable = np.isfinite(base) & np.isfinite(head) & (base > 0) & (head > 0)
    return Blocks(base[usable], head[usable], placement[usable], clock[usable])


def _within(modes: ProcessModes, confidence: float) -> tuple[float, float, float, float]:
    """Estimate, bounds and p-value as `_student`, from processes in the same mode.

    The modes are strata, weighted by the number of processes on both sides.
    """
    return _bounds(*modes.difference(), confidence)


def _student(means: Floats, confidence: float) -> tuple[float, float, float, float]:
    """Estimate, lower and upper bound, and two-sided p-value of a mean of 0."""
    error = float(means.std(ddof=1)) / float(np.sqrt(means.size))
    return _bounds(float(means.mean()), error, means.size - 1, confidence)


def _bounds(
    estimate: float, error: float, freedom: int, confidence: float
) -> tuple[float, float, float, float]:
    reach = float(special.stdtrit(freedom, confidence)) * error
    if error == 0:
        return estimate, estimate, estimate, 1.0 if estimate == 0 else 0.0
    p_value = 2 * float(special.stdtr(freedom, -abs(estimate) / error))
    return estimate, estimate - reach, estimate + reach, p_value


def _reason(verdict: Verdict, estimate: float, low: float, high: float, confidence: float) -> str:
    change = _change(estimate, low, high, confidence)
    return f"{change}: more placements are needed" if verdict is Verdict.AMBIGUOUS else change


def _change(estimate: float, low: float, high: float, confidence: float) -> str:
    bounds = f"{np.expm1(low):+.2%} and {np.expm1(high):+.2%}"
    return f"{np.expm1(estimate):+.2%}, {100 * confidence:.3g} % bounds {bounds}"


def _undecided(verdict: Verdict, reason: str, blocks: int, placements: int) -> Confirmation:
    nan = float("nan")
    return Confirmation(verdict, Cause.NONE, reason, nan, nan, nan, nan, nan, blocks, placements)
