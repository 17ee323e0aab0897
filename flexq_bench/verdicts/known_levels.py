"""Levels of a history that interleaved comparisons have confirmed, and the noise they refuted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexq_bench.stats.log_series import SMALLEST_LOG_RATIO, Floats
from flexq_bench.verdicts.alert_rule import HISTORY_RESULTS
from flexq_bench.verdicts.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison of two results of a history, by their indices. change: ln(head / base)."""

    base: int
    head: int
    change: float

    @classmethod
    def of(cls, verdict: str, log_ratio: float | None, base: int, head: int) -> Compared | None:
        """Return it with the change that its verdict states; None: the verdict states none."""
        if verdict == Verdict.SAME:
            return cls(base, head, 0.0)
        is_change = verdict in (Verdict.SLOWER, Verdict.FASTER)
        return cls(base, head, log_ratio) if is_change and log_ratio is not None else None


@dataclass(frozen=True, slots=True)
class KnownLevels:
    """A history without the changes that comparisons have confirmed.

    values: [n], each moved to the level of the newest, so that only news differ from the others.
    unchanged: indices of results at which a comparison found the level of the result before.
    """

    values: Floats
    unchanged: tuple[int, ...]


def known_levels(values: Sequence[float], comparisons: Sequence[Compared]) -> KnownLevels:
    """Move the results of a history to its newest level, by the comparisons of its commits.

    values: [n], positive, oldest first. comparisons: in the order in which they were made. The
    level of a head is that of its base, times the change; it lasts until a later comparison. A
    result between the two has the one of both levels that is nearer.
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    levels = np.zeros(logs.size)
    unchanged = []
    for one in comparisons:
        if not 0 <= one.base < one.head < logs.size:
            continue
        after = float(levels[one.base]) + one.change
        if abs(after - float(levels[one.head - 1])) < SMALLEST_LOG_RATIO:
            unchanged.append(one.head)
        start = max(one.base + 1 - HISTORY_RESULTS, 0)
        zero = statistics.median((logs - levels)[start : one.base + 1].tolist())
        if one.head > one.base + 1:
            between = slice(one.base + 1, one.head)
            apart = logs[between] - zero
            is_nearer = np.abs(apart - after) < np.abs(apart - levels[between])
            levels[between][is_nearer] = after
        levels[one.head :] = after
    newest = float(levels[-1]) if logs.size else math.nan
    return KnownLevels(np.exp(logs - levels + newest), tuple(unchanged))
