"""The budget of comparisons: the most suspicious series first, by evidence and not by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.log_series import SCALE_FLOOR, Floats, positive_logs, robust_scale
from flexq_bench.verdicts.alert_rule import HISTORY_RESULTS

_FEWEST_OF_A_MODE = 3
_MODE_SIGMAS = 5.0  # between two levels of a history that are two modes of it
_CLIP = 4.0  # sigmas that one series adds to its family: the others have to agree
_A_NIGHT = 2.0  # evidence that a night of waiting is worth


@dataclass(frozen=True, slots=True)
class Surprise:
    """Distance of a result from the levels of its history, in sigmas; positive is slower.

    family: series that one commit tends to change together, on one kind of GPU. waited: nights in
    which it was a candidate and was not compared.
    """

    sigmas: float
    family: Hashable
    is_candidate: bool = True
    waited: int = 0


def surprise(history: ArrayLike, latest: float) -> float:
    """Signed sigmas (MAD, at least 0.2 %) between a result and the nearest level of its history.

    history: [n], oldest first; the last 30 count. Of a history with two modes the nearer one
    counts: a kernel that runs at either of two speeds is no news at either. 0: nothing to tell it
    by. Raises ValueError if history is not one-dimensional.
    """
    logs, _ = positive_logs(history)
    newest, _ = positive_logs([latest])
    logs = logs[-HISTORY_RESULTS:]
    if logs.size == 0 or newest.size == 0:
        return 0.0
    levels = _modes_of(np.sort(logs))
    around = np.concatenate([level - np.median(level) for level in levels])
    scale = float(robust_scale(around))
    # With few results the median and the scale are guesses.
    scale *= float(np.sqrt(1 + np.pi / 2 / logs.size)) * (1 + 2 / logs.size)
    distances = [float(newest[0] - np.median(level)) for level in levels]
    return min(distances, key=abs) / scale


def _modes_of(ordered: Floats) -> list[Floats]:
    """The two modes of sorted values, or all of them as one."""
    inner = np.diff(ordered)[_FEWEST_OF_A_MODE - 1 : ordered.size - _FEWEST_OF_A_MODE]
    if inner.size == 0:
        return [ordered]
    split = int(inner.argmax()) + _FEWEST_OF_A_MODE
    low, high = ordered[:split], ordered[split:]
    around = np.concatenate([low - np.median(low), high - np.median(high)])
    gap = float(np.median(high) - np.median(low))
    if gap < 2 * _MODE_SIGMAS * max(float(np.sqrt(np.mean(around**2))), SCALE_FLOOR / 2):
        return [ordered]
    return [low, high]


def joint_sigmas(surprises: Sequence[Surprise]) -> dict[Hashable, float]:
    """By family: how far out all its series are together, as one normal deviate (Stouffer 1949).

    All count, candidates or not: one commit that slows each of a hundred shapes by half a sigma is
    five sigmas away from chance. Each is clipped at 4, so that no single series makes a family.
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for one in surprises:
        members[one.family].append(float(np.clip(one.sigmas, -_CLIP, _CLIP)))
    return {family: float(np.sum(z) / np.sqrt(len(z))) for family, z in members.items()}


def ranked(surprises: Sequence[Surprise]) -> list[int]:
    """Indices of the candidates, the one to compare first at the front.

    Evidence is half the square of a deviate: of the series itself, and of its family where that
    went the same way. What the family says counts fully for its first member, half as much for the
    second, and so on: a few comparisons settle what one commit did to all. Each night of waiting
    adds to it.
    """
    joint = joint_sigmas(surprises)
    taken: dict[Hashable, int] = defaultdict(int)

    def own(at: int) -> float:
        one = surprises[at]
        return one.sigmas**2 / 2 + _A_NIGHT * one.waited

    left = sorted((at for at, one in enumerate(surprises) if one.is_candidate), key=own)
    evidence = []
    while left:  # the most suspicious of each family first: sorted, so that its order is known
        at = left.pop()
        one = surprises[at]
        agrees = max(joint[one.family] * np.sign(one.sigmas), 0.0)
        evidence.append((own(at) + float(agrees) ** 2 / 2 / 2 ** taken[one.family], at))
        taken[one.family] += 1
    return [at for _, at in sorted(evidence, key=lambda pair: (-pair[0], pair[1]))]
