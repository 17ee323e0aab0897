"""The budget of comparisons: order of the candidates by evidence, not by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.log_series import SCALE_FLOOR, Floats, Ints, positive_logs, robust_scale
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
    return surprises([(history, latest)])[0]


def surprises(series: Sequence[tuple[ArrayLike, float]]) -> list[float]:
    """Return `surprise` of each history and latest result, all at once."""
    result = [0.0] * len(series)
    of_sizes: dict[int, list[tuple[int, Floats, float]]] = defaultdict(list)
    for index, (history, latest) in enumerate(series):
        logs, newest = (positive_logs(values)[0] for values in (history, [latest]))
        if logs.size and newest.size:
            window = logs[-HISTORY_RESULTS:]
            of_sizes[window.size].append((index, window, float(newest[0])))
    for size, group in of_sizes.items():
        indices, windows, latest_logs = zip(*group, strict=True)
        levels, around = _levels_of(np.sort(np.stack(windows), axis=-1))
        distances = np.asarray(latest_logs)[:, None] - levels
        nearest = np.take_along_axis(distances, np.abs(distances).argmin(axis=1)[:, None], axis=1)
        scale = prediction_scale(robust_scale(around), size, center=size)
        for index, sigmas in zip(indices, (nearest[:, 0] / scale).tolist(), strict=True):
            result[index] = sigmas
    return result


def _levels_of(ordered: Floats) -> tuple[Floats, Floats]:
    """The two modes of sorted values [s, n], equal if there is one: [s, 2]; distances [s, n]."""
    count, size = ordered.shape
    whole = _median_between(ordered, np.zeros(count, np.int64), np.full(count, size))
    levels, around = np.stack([whole, whole], axis=1), ordered - whole[:, None]
    inner = np.diff(ordered)[:, _MIN_MODE_RESULTS - 1 : size - _MIN_MODE_RESULTS]
    if inner.shape[1] == 0:
        return levels, around
    split = inner.argmax(axis=1) + _MIN_MODE_RESULTS
    low = _median_between(ordered, np.zeros(count, np.int64), split)
    high = _median_between(ordered, split, np.full(count, size))
    is_low = np.arange(size) < split[:, None]
    apart = ordered - np.where(is_low, low[:, None], high[:, None])
    noise = np.maximum(np.sqrt(np.mean(apart**2, axis=1)), SCALE_FLOOR / 2)
    are_two = (high - low >= 2 * _MIN_MODE_DISTANCE_SIGMAS * noise)[:, None]
    return (
        np.where(are_two, np.stack([low, high], axis=1), levels),
        np.where(are_two, apart, around),
    )


def _median_between(ordered: Floats, start: Ints, stop: Ints) -> Floats:
    """Median [s] of the columns from start to stop [s] of sorted values [s, n]."""
    rows, length = np.arange(len(ordered)), stop - start
    middle: Floats = ordered[rows, start + (length - 1) // 2] + ordered[rows, start + length // 2]
    return middle / 2


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
