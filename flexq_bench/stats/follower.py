"""Steps of a series, decided one value after the other, as its commits arrive."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from flexq_bench.stats.log_series import (
    MAD_TO_SIGMA,
    SAME_VALUE,
    SPIKE_SIGMAS,
    Floats,
    Ints,
    median,
)
from flexq_bench.stats.newest_step import (
    FEWEST_POINTS,
    SHORTEST_LEVEL,
    newest_step,
)

SIGNIFICANCE = 0.001  # probability of a false step in one look at the series
# values. While a series has changed once, so many before its step are enough, or half on either
# side, or half as many again in all. If it came back, a step is reported once few series that
# switch between two levels with this chance a value would have switched so seldom. A change by half
# is no such switch.
SETTLED = 30
SWITCHING = 0.1
SELDOM = 0.026
LARGE = float(np.log(1.5))
_NEARER = 0.5  # of the step: nearer to one of its levels than to the other
# Nobody looks for smaller steps than a share of the range of the levels so far, and than another of
# those of the last `SETTLED` values. A change of so much always counts.
_LEAST_SHARE = 0.1
_LEAST_LATER = 0.4
_MOST = 0.1
_GATE_SIGMAS = 1.5  # beyond it, three values on one side of the level are a reason to look
_AGAIN = 8  # a look that finds nothing is repeated after an eighth of the values since its step
# growth of a level after which a look is due: weak steps pass the gate unseen. Each look may be
# false, and with a smaller one levels that wander are looked at more often
_REGULAR = 2
_DIFFERENCE = MAD_TO_SIGMA / float(np.sqrt(2))  # median of differences to sigma


@dataclass(frozen=True, slots=True)
class History:
    """Steps of values [n]: indices are those of the values, effects in their unit.

    steps: indices and p-values, oldest first. waiting: those that are not reported yet. spells:
    (start, stop, effect). drift: of all levels, per value.
    """

    steps: tuple[tuple[int, float], ...] = ()
    waiting: tuple[tuple[int, float], ...] = ()
    spells: tuple[tuple[int, int, float], ...] = ()
    drift: float = 0.0


@dataclass(slots=True)
class Level:
    """A level that began at `start`, from a level `before` it.

    excluded: visits (start, stop) of the level before it, which do not belong to that level.
    settles: its step belongs to a larger one just before it, and is never reported. is_reported: it
    is no switch between two levels; until then its step is not reported.
    """

    start: int
    before: float
    effect: float
    p_value: float
    first: int
    excluded: list[tuple[int, int]]
    settles: bool
    is_reported: bool = False

    def place(self, value: float) -> float:
        """Place of a value: 0 on the level before, 1 on this one."""
        return (value - self.before) / self.effect


@dataclass(slots=True)
class Follower:
    """Follows a series value by value. A decision depends only on the values seen by then.

    values: [n], of which only those that were seen count. smallest: step that counts, in their
    unit. are_logs: a large ratio is no switch between two levels. any_share: a step counts however
    large others are. noise: least sigma of a value. Call `see` for every number of values from 8
    on.
    """

    values: Floats
    smallest: float
    are_logs: bool = True
    any_share: bool = False
    noise: float = 0.0
    plain: list[float] = field(init=False)
    first: int = 0  # of the present level
    excluded: list[tuple[int, int]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
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
        if not self._has_returned(seen):
            # A step may disclose another one after it.
            while seen - self.first >= FEWEST_POINTS and self._is_due(seen) and self._look(seen):
                pass
        for level in [one for one in self.levels if not one.is_reported]:
            lasts = self.lasts(level, seen)
            if level is not self.levels[-1]:
                level.is_reported = lasts
            elif lasts or seen - level.start == FEWEST_POINTS:
                # By what came after it, its position is surer.
                self.levels.pop()
                self._restart(level.first, level.excluded)
                if self._look(seen):
                    self.levels[-1].is_reported = lasts and not self.levels[-1].settles

    @property
    def history(self) -> History:
        """Result for the values seen so far."""
        reported, waiting = (
            tuple(
                (one.start, one.p_value)
                for one in self.levels
                if one.is_reported is is_reported and not one.settles
            )
            for is_reported in (True, False)
        )
        return History(reported, waiting, tuple(self.spells))

    def _restart(self, first: int, excluded: list[tuple[int, int]]) -> None:
        """Make `first` the beginning of the present level."""
        self.first, self.excluded = first, excluded
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
        """Return True if a young level ended by a return; it becomes a spell."""
        level = self.levels[-1] if self.levels else None
        if level is None or not SHORTEST_LEVEL < seen - level.start <= 2 * SHORTEST_LEVEL:
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
        self.levels.pop()
        self._restart(level.first, [*level.excluded, *spell])
        self.spells += [(start, stop, level.effect) for start, stop in spell]
        return True

    def _look(self, seen: int) -> bool:
        """Look for the newest step; return True if there is one."""
        index = outside(self.first, seen, self.excluded)
        step = (
            newest_step(self.values[index], seen, noise=self.noise)
            if index.size >= FEWEST_POINTS
            else None
        )
        self.look_at = None
        if step is None:
            return False
        if step.p_value <= SIGNIFICANCE and abs(step.effect) >= self._least(step.before):
            start = int(index[step.place])
            settles = abs(step.effect) < self._least_later(start, step.before)
            found = start, step.before, step.effect, step.p_value
            self.levels.append(Level(*found, self.first, self.excluded, settles))
            self._restart(start, [])
            self.look_at = seen
            return True
        if self.was_beyond:
            self.look_at = seen + max(1, (index.size - step.place) // _AGAIN)
        return False

    def _least(self, present: float) -> float:
        """Smallest step that counts beside the levels that lasted, and the present one."""
        lasted = (one.before for one in self.levels if one.start - one.first >= FEWEST_POINTS)
        return self.least_beside([present, *lasted])

    def least_beside(self, levels: list[float]) -> float:
        """Smallest step that counts beside these levels."""
        share = 0.0 if self.any_share else _LEAST_SHARE * (max(levels) - min(levels))
        return max(self.smallest, min(share, _MOST))

    def _least_later(self, start: int, present: float) -> float:
        """Smallest step at `start` that is no part of a larger one before it."""
        if self.any_share:
            return 0.0
        # a benchmark's first values are often odd
        later = [one for one in self.levels if one.start > FEWEST_POINTS]
        levels = [present, *(one.before for one in later if start - one.start <= SETTLED)]
        return min(_LEAST_LATER * (max(levels) - min(levels)), _MOST)

    def lasts(self, level: Level, seen: int, seldom: float | None = None) -> bool:
        """Return True if a series that switches would seldom have stayed at its levels so long."""
        if level.settles or seen - level.start < SHORTEST_LEVEL:
            return False
        if self.are_logs and abs(level.effect) >= LARGE:
            return True
        values = self.values[:seen]
        noise = _DIFFERENCE * float(np.median(np.abs(np.diff(values))))
        are_apart = abs(level.effect) >= SPIKE_SIGMAS * noise
        places = (values - level.before) / level.effect
        changed_once = not are_apart or _switches(places) == 1
        sides = level.start, seen - level.start
        is_settled = max(sides[0], 2 * min(sides), seen // 1.5) >= SETTLED
        if changed_once and is_settled and sides[0] >= FEWEST_POINTS:
            return True
        if level.start > FEWEST_POINTS:  # a benchmark's first values are often odd
            places = places[FEWEST_POINTS:]
        switches = 1
        if are_apart:
            places[1:-1] = median(np.stack((places[:-2], places[1:-1], places[2:]), axis=1))
            switches = max(_switches(places), 1)
        return float(special.bdtr(switches, places.size, SWITCHING)) <= (seldom or SELDOM)


def _switches(places: Floats) -> int:
    """Number of changes between values near 0 and values near 1.

    Others do not count, so a third level between them may be halfway.
    """
    upper = places[np.minimum(np.abs(places), np.abs(places - 1)) < _NEARER / 2] > _NEARER
    return int(np.count_nonzero(upper[1:] != upper[:-1]))


def outside(first: int, stop: int, visits: list[tuple[int, int]]) -> Ints:
    """The indices [first, stop) without those of visits (start, stop)."""
    index = np.arange(first, stop)
    for start, end in visits:
        index = index[(index < start) | (index >= end)]
    return index


def followed(
    values: Floats,
    smallest: float = 0.0,
    *,
    are_logs: bool = True,
    any_share: bool = False,
    noise: float = 0.0,
) -> Follower:
    """A follower that saw values [n], all finite, one after the other.

    Other arguments: its own. The result for the first k values never depends on later ones, and a
    step stays unless its level ends within 6 values by a return to the one before. Values that are
    equal, or fewer than 8, have no step.
    """
    follower = Follower(values, smallest, are_logs, any_share, noise)
    if values.size >= FEWEST_POINTS and np.ptp(values) > SAME_VALUE * np.abs(values).max():
        for seen in range(FEWEST_POINTS, values.size + 1):
            follower.see(seen)
    return follower
