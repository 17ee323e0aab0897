"""The cheap look at tonight's result: is it worth an interleaved comparison?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.series import Floats, positive_logs, robust_scale
from flexq_bench.verdicts.verdict import Verdict

WINDOW = 30  # accepted results of the same epoch
RECENT = 5  # the newest of them: tells a step in a series that has two modes
FEWEST_FOR_SCALE = 5
SIGMAS = 2.0
# However noisy a series is, a change of this size (ln) is looked at: noise costs confirmations,
# it does not make us blind.
ALWAYS = 0.018


@dataclass(frozen=True, slots=True)
class Trigger:
    """What the history says about the latest result.

    verdict: candidate, same or no-data. z: robust, in units of `scale`. log_change: ln(latest /
    median), positive is more. scale: sigma of the history's logs. history: results it rests on.
    """

    verdict: Verdict
    z: float
    log_change: float
    scale: float
    history: int


def trigger(history: ArrayLike, latest: float) -> Trigger:
    """Whether the latest accepted result of a series differs from its history, either way.

    history: [n], oldest first, accepted results of the latest one's epoch; the last 30 count.
    latest: in the same unit. A difference is 2 robust sigmas (MAD, at least 0.2 %) or 1.8 %, from
    the median of the 30 or of the newest 5; with fewer than 5 results, which tell no sigma, 1.8 %.
    no-data: no usable result before it, or latest is no positive number. Half of the work is to be
    wrong cheaply: 1 night in 7 of a quiet series is a candidate, `confirm` decides. Raises
    ValueError if history is not one-dimensional.
    """
    logs, _ = positive_logs(history)
    newest, usable = positive_logs([latest])
    logs = logs[-WINDOW:]
    if logs.size == 0 or usable.size == 0:
        nan = float("nan")
        return Trigger(Verdict.NO_DATA, nan, nan, nan, logs.size)
    change, scale, candidate = trigger_many(logs, newest[0])
    return Trigger(
        Verdict.CANDIDATE if candidate else Verdict.SAME,
        z=float(change / scale),
        log_change=float(change),
        scale=float(scale),
        history=logs.size,
    )


def trigger_many(
    windows: Floats, latest: Floats | np.float64
) -> tuple[Floats, Floats, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """The rule of `trigger` on many series at once: log change, scale, whether a candidate.

    windows: [..., n >= 1], logs, oldest first. latest: [...], logs. All results are [...].
    """
    scale = robust_scale(windows)
    change = latest - np.median(windows, axis=-1)
    recent = latest - np.median(windows[..., -RECENT:], axis=-1)
    # A new series, or a new driver, must leave nobody blind until there are enough.
    few = windows.shape[-1] < FEWEST_FOR_SCALE
    limit = np.minimum(np.inf if few else SIGMAS * scale, ALWAYS)
    candidate = (np.abs(change) >= limit) | (np.abs(recent) >= limit)
    return np.asarray(change), scale, np.asarray(candidate)
