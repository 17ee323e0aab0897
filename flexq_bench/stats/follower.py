"""Steps of a series, decided one value after the other, as its commits arrive."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from flexq_bench.stats.log_series import MAD_TO_SIGMA, SAME_VALUE, Floats
from flexq_bench.stats.newest_step import (
    FEWEST_POINTS,
    SHORTEST_LEVEL,
    NewestStep,
    newest_step,
)

SIGNIFICANCE = 0.001  # probability of a false step in one look at the series
# values of a series after which a new level needs only three: one that switches between two levels
# with a chance of 10 % a value has done so by then, except once in 7
SETTLED = 18
# in a shorter series both levels must have lasted, which such a series does once in 8
LONG_BEFORE, LONG_AFTER = 10, 12
_NEARER = 0.5  # of the step: nearer to one of its levels than to the other
_APART_SIGMAS = 6.0  # of levels that single values tell apart, so that visits can be counted
# of the range of the levels so far, up to a factor of e: nobody looks for smaller steps
_LEAST_SHARE = 0.1
_GATE_SIGMAS = 1.5  # beyond it, three values on one side of the level are a reason to look
_AGAIN = 8  # a look that finds nothing is repeated after an eighth of the values since its step
# growth of a level after which a look is due: weak steps pass the gate unseen. Each look may be
# false, and with a smaller one levels that wander are looked at more often
_REGULAR = 2
_DIFFERENCE = MAD_TO_SIGMA / float(np.sqrt(2))  # median of differences to sigma


@dataclass(frozen=True, slots=True)
class History:
    """Steps of values [n]: indices are those of the values, effects in their unit.

    steps: indices and p-values, oldest first. waiting: the newest step if it is not decided yet.
    spells: (start, stop, effect).
    """

    steps: tuple[tuple[int, float], ...] = ()
    waiting: tuple[int, float] | None = None
    spells: tuple[tuple[int, int, float], ...] = ()


@dataclass(slots=True)
class _Level:
    """A decided level, or one that waits: it began at `start`, from a level `before` it.

    excluded: visits (start, stop) of the level before it, which do not belong to that level.
    """

    start: int
    before: float
    effect: float
    p_value: float
    first: int
    excluded: list[tuple[int, int]]

    def place(self, value: float) -> float:
        """Place of a value: 0 on the level before, 1 on this one."""
        return (value - self.before) / self.effect


@dataclass(slots=True)
class Follower:
    """Follows a series value by value. A decision depends only on the values seen by then.

    values: [n], of which only those that were seen count. smallest: step that counts, in their
    unit. Call `see` for every number of values from 8 on.
    """

    values: Floats
    smallest: float
    plain: list[float] = field(init=False)
    first: int = 0  # of the present level
    excluded: list[tuple[int, int]] = field(default_factory=list)
    decided: list[_Level] = field(default_factory=list)
    waiting: _Level | None = None
    spells: list[tuple[int, int, float]] = field(default_factory=list)
    sorted_values: list[float] = field(default_factory=list)
    sorted_moves: list[float] = field(default_factory=list)
    counted: int = 0
    look_at: int | None = None
    regular: int = 0
    was_beyond: bool = False

    def __post_init__(self) -> None:
        self.plain = self.values.tolist()
        self._restart(0, [])

    def see(self, seen: int) -> None:
        """Decide on the first `seen` values."""
        if self._has_returned(seen):
            return
        # A decision may disclose another step after it.
        while seen - self.first >= FEWEST_POINTS and self._is_due(seen):
            if not self._look(seen):
                return

    @property
    def history(self) -> History:
        """Result for the values seen so far."""
        waiting = self.waiting
        return History(
            tuple((one.start, one.p_value) for one in self.decided),
            None if waiting is None else (waiting.start, waiting.p_value),
            tuple(self.spells),
        )

    def _restart(self, first: int, excluded: list[tuple[int, int]]) -> None:
        """Make `first` the beginning of the present level."""
        self.first, self.excluded, self.waiting = first, excluded, None
        self.sorted_values, self.sorted_moves = [], []
        self.counted, self.look_at, self.was_beyond = first, None, False
        self.regular = round(FEWEST_POINTS * _REGULAR)

    def _count(self, stop: int) -> None:
        """Add values before `stop` to the statistics of the present level."""
        while self.counted < stop:
            at = self.counted
            if not any(start <= at < end for start, end in self.excluded):
                insort(self.sorted_values, self.plain[at])
                if at > self.first:
                    insort(self.sorted_moves, abs(self.plain[at] - self.plain[at - 1]))
            self.counted += 1

    def _is_due(self, seen: int) -> bool:
        """Return True if the newest values, or their number, are a reason for a look."""
        self._count(seen - SHORTEST_LEVEL)
        middle = self.sorted_values[len(self.sorted_values) // 2]
        moves = self.sorted_moves
        limit = _GATE_SIGMAS * _DIFFERENCE * moves[len(moves) // 2] if moves else 0.0
        newest = [value - middle for value in self.plain[seen - SHORTEST_LEVEL : seen]]
        beyond = min(newest) > limit or max(newest) < -limit
        due = (beyond and not self.was_beyond) or (
            self.look_at is not None and seen >= self.look_at
        )
        self.was_beyond = beyond
        if seen - self.first >= self.regular:
            self.regular = int((seen - self.first) * _REGULAR) + 1
            due = True
        return due

    def _has_returned(self, seen: int) -> bool:
        """Return True if a level that waits, or is young, ended by a return; it becomes a spell."""
        young = self.decided[-1] if self.decided else None
        if young is not None and seen - young.start > 2 * SHORTEST_LEVEL:
            young = None
        level = self.waiting or young
        if level is None or seen - level.start <= SHORTEST_LEVEL:
            return False
        newest = sorted(level.place(value) for value in self.plain[seen - SHORTEST_LEVEL : seen])
        if newest[-1] >= _NEARER or newest[1] < -_NEARER:
            return False
        end = seen
        while end > level.start and level.place(self.plain[end - 1]) < _NEARER:
            end -= 1
        if end - level.start > SHORTEST_LEVEL:
            return False
        spell = [(level.start, end)] if end > level.start else []
        if level is young:
            self.decided.pop()
            self._restart(level.first, [*level.excluded, *spell])
        else:
            self.waiting = None
            self.excluded = self.excluded + spell
        self.spells += [(start, stop, level.effect) for start, stop in spell]
        return True

    def _look(self, seen: int) -> bool:
        """Look for the newest step, also since one that waits; return True if it is decided."""
        since = 0
        starts = [self.first] if self.waiting is None else [self.first, self.waiting.start]
        for first in starts:
            index = np.arange(first, seen)
            for start, stop in self.excluded:
                index = index[(index < start) | (index >= stop)]
            step = newest_step(self.values[index], seen) if index.size >= FEWEST_POINTS else None
            if step is None:
                break
            if step.p_value <= SIGNIFICANCE and abs(step.effect) >= self._least(step.before):
                return self._decide(step, int(index[step.place]), seen)
            since = index.size - step.place
        self.look_at = seen + max(1, since // _AGAIN) if self.was_beyond else None
        return False

    def _least(self, present: float) -> float:
        """Smallest step that counts beside the levels that lasted, and the present one."""
        lasted = (one.before for one in self.decided if one.start - one.first >= LONG_BEFORE)
        levels = [present, *lasted]
        return max(self.smallest, _LEAST_SHARE * min(max(levels) - min(levels), 1.0))

    def _decide(self, step: NewestStep, start: int, seen: int) -> bool:
        """Decide on a significant step, or let it wait until levels have lasted."""
        level = _Level(
            start, step.before, step.effect, step.p_value, self.first, list(self.excluded)
        )
        times = 1 + self._visits(level, seen)
        before, after = step.place, seen - start
        if seen >= SETTLED * times or (
            before >= LONG_BEFORE * times and after >= LONG_AFTER * times
        ):
            self.decided.append(level)
            self._restart(start, [])
            self.look_at = seen
            return True
        if self.waiting is None or abs(self.waiting.start - start) > SHORTEST_LEVEL:
            self.waiting = level
        self.look_at = seen + (1 if seen < SETTLED else max(1, after // _AGAIN))
        return False

    def _visits(self, level: _Level, seen: int) -> int:
        """Count short visits to the new level before it began, and to the old one since then."""
        moves = np.abs(np.diff(self.values[:seen]))
        if abs(level.effect) < _APART_SIGMAS * _DIFFERENCE * float(np.median(moves)):
            return 0
        places = (self.values[:seen] - level.before) / level.effect
        places[1:-1] = np.median(np.stack((places[:-2], places[1:-1], places[2:])), axis=0)
        start = level.start
        return _short_runs(np.abs(places[:start] - 1) < _NEARER, FEWEST_POINTS) + _short_runs(
            np.abs(places[start:]) < _NEARER, FEWEST_POINTS - start
        )


def _short_runs(there: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], first: int) -> int:
    """Number of runs of True that are too short to be a level of their own.

    first: runs that end before it do not count, since a benchmark's first values are often odd.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([0], there.astype(np.int8), [0]))))
    begins, ends = edges[::2], edges[1::2]
    return int(np.count_nonzero((ends - begins < LONG_BEFORE) & (ends > first)))


def follow(values: Floats, smallest: float = 0.0) -> History:
    """The steps of values [n], all finite, decided value by value.

    smallest: step that counts, in their unit. The result for the first k values never depends on
    later ones, and a step stays unless its level ends within 6 values by a return to the one
    before. Values that are equal, or fewer than 8, have no step.
    """
    if values.size < FEWEST_POINTS or np.ptp(values) <= SAME_VALUE * np.abs(values).max():
        return History()
    follower = Follower(values, smallest)
    for seen in range(FEWEST_POINTS, values.size + 1):
        follower.see(seen)
    return follower.history
