"""The budget of comparisons: order of the candidates by evidence, not by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.log_series import SCALE_FLOOR, Floats, positive_logs, robust_scale
from flexq_bench.verdicts.alert_rule import HISTORY_RESULTS
from flexq_bench.verdicts.history_trigger import prediction_scale

_MIN_MODE_RESULTS = 3
_MIN_MODE_DISTANCE_SIGMAS = 5.0  # of two levels of a history
_MAX_SIGMAS = 4.0  # that one series contributes to its family
_EVIDENCE_PER_NIGHT = 2.0  # of waiting


@dataclass(frozen=True, slots=True)
class Surprise:
    """Distance of a result from the levels of its history, in sigmas; positive is slower.

    family: series that one commit often changes together, on one kind of GPU. waited: number of
    nights in which the series was a candidate and was not compared.
    """

    sigmas: float
    family: Hashable
    is_candidate: bool = True
    waited: int = 0


def surprise(history: ArrayLike, latest: float) -> float:
    """Signed sigmas (MAD, at least 0.2 %) between a result and the nearest level of its history.

    history: [n], oldest first; the last 30 count. If a history has two modes, the nearer one
    counts, so that neither speed of a two-speed kernel is a change. 0: the history has no usable
    values. Raises ValueError if history is not one-dimensional.
    """
    logs, _ = positive_logs(history)
    newest, _ = positive_logs([latest])
    logs = logs[-HISTORY_RESULTS:]
    if logs.size == 0 or newest.size == 0:
        return 0.0
    levels = _modes_of(np.sort(logs))
    around = np.concatenate([level - _median_of(level) for level in levels])
    scale = float(prediction_scale(robust_scale(around), logs.size, center=logs.size))
    distances = [float(newest[0]) - _median_of(level) for level in levels]
    return min(distances, key=abs) / scale


def _modes_of(ordered: Floats) -> list[Floats]:
    """The two modes of sorted values, or all of them as one mode."""
    inner = np.diff(ordered)[_MIN_MODE_RESULTS - 1 : ordered.size - _MIN_MODE_RESULTS]
    if inner.size == 0:
        return [ordered]
    split = int(inner.argmax()) + _MIN_MODE_RESULTS
    low, high = ordered[:split], ordered[split:]
    around = np.concatenate([low - _median_of(low), high - _median_of(high)])
    gap = _median_of(high) - _median_of(low)
    if gap < 2 * _MIN_MODE_DISTANCE_SIGMAS * max(
        float(np.sqrt(np.mean(around**2))), SCALE_FLOOR / 2
    ):
        return [ordered]
    return [low, high]


def _median_of(ordered: Floats) -> float:
    """Median of sorted values; numpy's would take most of a night's time here."""
    return float(ordered[(ordered.size - 1) // 2] + ordered[ordered.size // 2]) / 2


def joint_sigmas(surprises: Sequence[Surprise]) -> dict[Hashable, float]:
    """Joint deviation of all series of each family, as one normal deviate (Stouffer 1949).

    All series count, candidates or not: a commit that slows each of a hundred shapes by half a
    sigma gives five sigmas. Each series is clipped at 4, so that one alone does not mark its
    family.
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for surprise in surprises:
        members[surprise.family].append(float(np.clip(surprise.sigmas, -_MAX_SIGMAS, _MAX_SIGMAS)))
    return {family: float(np.sum(z) / np.sqrt(len(z))) for family, z in members.items()}


def ranked(surprises: Sequence[Surprise]) -> list[int]:
    """Indices of the candidates, in the order of comparison.

    Evidence is half the square of a deviate: that of the series, plus that of its family if both
    have the same direction. The family's evidence counts fully for its first candidate, half as
    much for the second, and so on, because a few comparisons are enough to judge a commit's effect
    on the family. Each night of waiting adds to the evidence.
    """
    joint = joint_sigmas(surprises)
    taken: dict[Hashable, int] = defaultdict(int)

    def evidence_of(index: int) -> float:
        candidate = surprises[index]
        return candidate.sigmas**2 / 2 + _EVIDENCE_PER_NIGHT * candidate.waited

    remaining = sorted(
        (index for index, candidate in enumerate(surprises) if candidate.is_candidate),
        key=evidence_of,
    )
    evidence = []
    # the best candidate of each family first; sorted, so that the order is deterministic
    while remaining:
        index = remaining.pop()
        family, sigmas = surprises[index].family, surprises[index].sigmas
        agreement = max(joint[family] * np.sign(sigmas), 0.0)
        evidence.append(
            (evidence_of(index) + float(agreement) ** 2 / 2 / 2 ** taken[family], index)
        )
        taken[family] += 1
    return [index for _, index in sorted(evidence, key=lambda pair: (-pair[0], pair[1]))]
