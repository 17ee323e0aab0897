"""Time offsets of devices from others of their kind, estimated from cases that several measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.bootstrap import median_interval

MIN_CASES = 3


@dataclass(frozen=True, slots=True)
class DeviceOffset:
    """ln(the device's time / the geometric mean of the devices'), median over cases.

    0.01 is 1 % slower. low, high: 95 % bootstrap interval. cases: shared with another device.
    """

    cases: int
    log_offset: float
    low: float
    high: float


def device_offsets(times: Mapping[str, ArrayLike], *, seed: int = 0) -> dict[str, DeviceOffset]:
    """Offsets by device. times: by device [cases], any unit, > 0; NaN: it did not measure the case.

    Index i is the same case for every device. Only cases of at least two devices count; a device
    with fewer than 3 such cases has no offset. Raises ValueError if lengths differ.
    """
    if len(times) < 2:
        return {}
    matrix = np.log(np.array([np.asarray(values, dtype=np.float64) for values in times.values()]))
    shared = np.isfinite(matrix).sum(axis=0) >= 2
    matrix = matrix[:, shared]
    if matrix.shape[1] == 0:
        return {}
    residuals = matrix - np.nanmean(matrix, axis=0)
    offsets = {}
    for device, row in zip(times, residuals, strict=True):
        usable = row[np.isfinite(row)]
        if usable.size >= MIN_CASES:
            interval = median_interval(usable, seed=seed)
            offsets[device] = DeviceOffset(
                usable.size, interval.estimate, interval.low, interval.high
            )
    return offsets
