"""Offsets between the GPUs of a run, from the cases that several of them measured."""

from __future__ import annotations

import math
from collections import defaultdict
from datetime import UTC, datetime
from statistics import fmean

from flexq_bench.db.engine import Session
from flexq_bench.db.fleet import OffsetInfo, add_offsets
from flexq_bench.db.queries import OffsetRow, device_medians, runs_on_several_devices
from flexq_bench.db.records import DeviceInfo
from flexq_bench.stats.device_offsets import device_offsets


def store_offsets(session: Session, run_uuid: str) -> None:
    """Compute and store the offsets of the run's devices, if they share enough cases."""
    offsets = offsets_of(session, run_uuid)
    if offsets:
        add_offsets(session, run_uuid, offsets, at=datetime.now(UTC))


def offsets_of(session: Session, run_uuid: str) -> list[OffsetInfo]:
    """The offsets of a run's devices; empty: too few shared cases."""
    times: dict[DeviceInfo, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, device, median_us in device_medians(session, run_uuid):
        times[device][case].append(median_us)
    cases = sorted({case for case_times in times.values() for case in case_times})
    devices = {device.uuid: device for device in times}
    if len(devices) < 2:
        return []
    table = {
        device.uuid: [fmean(medians[case]) if case in medians else math.nan for case in cases]
        for device, medians in times.items()
    }
    return [
        OffsetInfo(devices[uuid], offset.cases, offset.log_offset, offset.low, offset.high)
        for uuid, offset in device_offsets(table).items()
    ]


def offsets_of_imported(session: Session) -> list[OffsetRow]:
    """Compute device offsets of imported records, which have no stored offsets.

    They are of the newest run with several GPUs of one SKU and enough shared cases. Empty: there is
    no such run.
    """
    for run, created_at in runs_on_several_devices(session):
        offsets = offsets_of(session, run)
        if offsets:
            return [
                OffsetRow(
                    run, offset.device.uuid, offset.device.sku, offset.cases, offset.log_offset,
                    offset.low, offset.high, created_at,
                )
                for offset in offsets
            ]  # fmt: skip
    return []
