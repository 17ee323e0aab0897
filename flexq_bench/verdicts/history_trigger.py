"""Triggers: statistics that select results for an interleaved comparison.

Thresholds are in `flexq_bench.verdicts.alert_rule`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.log_series import Floats, positive_logs, robust_scale
from flexq_bench.verdicts.alert_rule import (
    FEWEST_AT_RELEASE,
    FEWEST_FOR_SCALE,
    HISTORY_RESULTS,
    RECENT_RESULTS,
    TRIGGER_ALWAYS,
    has_crept,
    outlier_limit,
)
from flexq_bench.verdicts.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Trigger:
    """Comparison of the latest result with its history.

    verdict: candidate, same or no-data. z: robust, in units of `scale`. log_change: ln(latest /
    median), positive is more. scale: sigma of the history's logs. history: number of results in it.
    """

    verdict: Verdict
    z: float
    log_change: float
    scale: float
    history: int


def trigger(history: ArrayLike, latest: float, *, unchanged: ArrayLike = ()) -> Trigger:
    """Compare the latest accepted result of a series with its history, in both directions.

    history: [n], oldest first, accepted results of the latest one's epoch; the last 30 count.
    latest: in the same unit. A candidate differs by 2.5 sigmas (of a prediction from a MAD of at
    least 0.2 %) from the median of the 30 or of the newest 5, or by 1.8 % from that of the 30; with
    fewer than 5 results, which give no sigma, by 1.8 %. unchanged: [m], earlier results at which a
    comparison found no change: a candidate differs by a quarter of a sigma more than those in its
    direction, and 1.8 % counts from the farthest of them on. no-data: no usable result before it,
    or latest is not a positive number. False candidates are accepted: `confirm` decides. Raises
    ValueError if history is not one-dimensional.
    """
    logs, _ = positive_logs(history)
    newest, usable = positive_logs([latest])
    noise, _ = positive_logs(unchanged)
    logs = logs[-HISTORY_RESULTS:]
    if logs.size == 0 or usable.size == 0:
        nan = float("nan")
        return Trigger(Verdict.NO_DATA, nan, nan, nan, logs.size)
    change, scale, candidate = trigger_many(logs, newest[0], noise)
    return Trigger(
        Verdict.CANDIDATE if candidate else Verdict.SAME,
        z=float(change / scale),
        log_change=float(change),
        scale=float(scale),
        history=logs.size,
    )


def are_candidates(series: Sequence[tuple[ArrayLike, float, ArrayLike]]) -> list[bool]:
    """Return for each series whether its latest result is a candidate, all at once.

    series: history, latest and unchanged, as `trigger` takes them.
    """
    result = [False] * len(series)
    of_sizes: dict[tuple[int, int], list[tuple[int, Floats, float, Floats]]] = defaultdict(list)
    for index, (history, latest, unchanged) in enumerate(series):
        logs, newest, noise = (positive_logs(x)[0] for x in (history, [latest], unchanged))
        logs = logs[-HISTORY_RESULTS:]
        if logs.size and newest.size:
            of_sizes[logs.size, noise.size].append((index, logs, float(newest[0]), noise))
    for group in of_sizes.values():
        indices, windows, latest_logs, noises = zip(*group, strict=True)
        _, _, candidate = trigger_many(np.stack(windows), np.asarray(latest_logs), np.stack(noises))
        for index, is_candidate in zip(indices, candidate.tolist(), strict=True):
            result[index] = is_candidate
    return result


def trigger_many(
    windows: Floats, latest: Floats | np.float64, unchanged: Floats | None = None
) -> tuple[Floats, Floats, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """Apply the rule of `trigger` to many series: log change, scale, True for a candidate.

    windows: [..., n >= 1], logs, oldest first. latest: [...], logs. unchanged: [..., m], logs. All
    results are [...].
    """
    scale = robust_scale(windows)
    results = windows.shape[-1]
    is_known = results >= FEWEST_FOR_SCALE
    candidate = np.zeros(scale.shape, np.bool_)
    for newest, always in ((results, TRIGGER_ALWAYS), (RECENT_RESULTS, math.inf)):
        if newest > results or not (is_known or math.isfinite(always)):
            continue
        center = np.median(windows[..., -newest:], axis=-1)
        change = np.asarray(latest - center)
        sigma = prediction_scale(scale, results, center=newest) if is_known else scale + math.inf
        noise = farthest = np.zeros_like(change)
        if unchanged is not None and unchanged.shape[-1]:
            apart = unchanged - center[..., None]
            farthest = np.abs(apart).max(axis=-1)
            noise = np.maximum((apart * np.sign(change)[..., None]).max(axis=-1), 0.0)
        candidate |= np.abs(change) >= outlier_limit(sigma, noise, farthest, always)
    return np.asarray(latest - np.median(windows, axis=-1)), scale, candidate


def prediction_scale(scale: Floats, results: int, *, center: int) -> Floats:
    """Sigma [...] of a new result about the median of the newest `center` of `results` ones.

    scale: [...], their MAD as a sigma. With few results both are uncertain.
    """
    return np.asarray(scale * np.sqrt(1 + np.pi / 2 / center) * (1 + 2 / results))


def creep(at_release: ArrayLike, since: ArrayLike) -> Trigger:
    """Compare the level with that of the last release, to detect changes in small steps.

    at_release: [n >= 3] accepted results of the release, or around it before anything changed.
    since: [m >= 3] later ones, oldest first; the newest 5 count. Any unit, one epoch.
    candidate: their medians are at least 1 % and 3 standard errors apart; confirm it against the
    release's commit. The window of `trigger` moves with the series and does not detect this.
    """
    release, _ = positive_logs(at_release)
    later, _ = positive_logs(since)
    later = later[-RECENT_RESULTS:]
    if min(release.size, later.size) < FEWEST_AT_RELEASE:
        nan = float("nan")
        return Trigger(Verdict.NO_DATA, nan, nan, nan, release.size)
    change = float(np.median(later) - np.median(release))
    centered = np.concatenate([release - np.median(release), later - np.median(later)])
    # pi/2: the variance of a median relative to that of a mean, for Gaussian noise.
    error = float(robust_scale(centered)) * float(
        np.sqrt(np.pi / 2 * (1 / release.size + 1 / later.size))
    )
    verdict = Verdict.CANDIDATE if has_crept(change, error) else Verdict.SAME
    return Trigger(verdict, change / error, change, error, release.size)
