"""Series whose changes are differences: counts and signed values, where 0 is a value like others.

A count that did not vary at all has no noise, so any other value that stays is a change. Patterns
are classified by logarithms: values are mapped to positive ones whose logarithms are the distances
from the median in units of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from flexq_bench.stats.log_series import Floats

_FEWEST_EQUAL = 3  # values, of a level that did not vary
FEWEST_OF_DIFFERENCES = _FEWEST_EQUAL + 1  # values with which a change may be found
_LOG_OF_SIGMA = 0.01  # a standard deviation of the noise becomes this difference of logarithms
_LINEAR = 5.0  # logarithms up to which distances are kept; larger ones are compressed


def as_positive(values: Sequence[float]) -> Floats:
    """Map [n] values to positive ones, in the same order; gaps (not finite) become NaN."""
    given = np.asarray(values, dtype=np.float64)
    known = given[np.isfinite(given)]
    mapped: Floats = np.full(given.shape, np.nan)
    if not known.size:
        return mapped
    changes = np.abs(np.diff(known))
    scatter = 1.4826 * float(np.median(changes)) / np.sqrt(2) if changes.size else 0.0
    if scatter == 0:
        scatter = float(min(changes[changes > 0], default=1.0))
    logs = (given - np.median(known)) * (_LOG_OF_SIGMA / scatter)
    far = np.abs(logs) > _LINEAR
    logs[far] = np.sign(logs[far]) * (_LINEAR + np.log1p(np.abs(logs[far]) - _LINEAR))
    mapped[:] = np.exp(logs)
    return mapped


def steps_from_constant(values: Sequence[float]) -> Iterator[int]:
    """Yield the indices at which values leave a level that did not vary.

    At least 3 equal values come before, since the start or the step before, and at least 3 values
    after, or all that there are, are larger, or are smaller. Gaps (NaN) are passed over.
    """
    places = [place for place, value in enumerate(values) if np.isfinite(value)]
    known = [values[place] for place in places]
    start = 0
    for index in range(1, len(known)):
        level = known[index - 1]
        if known[index] == level:
            continue
        sides = [math.copysign(1, value - level) * (value != level) for value in known[index:]]
        stays = len(set(sides[:_FEWEST_EQUAL])) == 1 and (
            len(sides) >= _FEWEST_EQUAL or len(set(sides)) == 1
        )
        if not stays:  # the level does vary
            return
        if index - start >= _FEWEST_EQUAL:
            yield places[index]
        start = index
