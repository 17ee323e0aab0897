"""Runs of decodes and servings: their cases, new or resumed, and their stored records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import DecodeRecord, RunInfo, ServingRecord
from flexq_bench.db.store import add_records
from flexq_bench.decode import SUITE, measurement
from flexq_bench.decode.case import DecodeCase, Setup
from flexq_bench.decode.records import ServingCase
from flexq_bench.decode.requests import LOGNORMAL, drawn_requests, read_requests
from flexq_bench.errors import UsageError
from flexq_bench.measure.device import device_info
from flexq_bench.measure.device_lock import devices_alone
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.lifecycle import OpenRun, new_run
from flexq_bench.runs.resume import check_same_work

R = TypeVar("R", DecodeRecord, ServingRecord)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Serving:
    """Options of servings, one per batch limit. memory_gib None: no limit. lengths: a file; None:
    random. times_limit: requests are so many for each slot.

    step_tokens: most prompt tokens between two steps.
    """

    batch_limits: tuple[int, ...]
    memory_gib: float | None
    requests: int
    longest: int
    lengths: str | None
    step_tokens: int
    times_limit: bool = False

    def count(self, limit: int) -> int:
        """Return the number of requests at a batch limit."""
        return self.requests * limit if self.times_limit else self.requests


def serving_cases(setup: Setup, serving: Serving) -> list[ServingCase]:
    """The same requests under every scheme and batch limit, or the first of them.

    Raises UsageError.
    """
    if not serving.batch_limits:
        raise UsageError("how many at a time? Give --batch-limit")
    # A memory limit determines the batch, so one batch limit is enough.
    limits = serving.batch_limits if serving.memory_gib is None else serving.batch_limits[-1:]
    most = max(map(serving.count, limits))
    if serving.lengths is None:
        requests = drawn_requests(most, serving.longest, setup.seed)
        lengths = f"{LOGNORMAL}, cut to {serving.longest // 2}"
    else:
        requests = read_requests(Path(serving.lengths))[:most]
        lengths = Path(serving.lengths).name
    memory = None if serving.memory_gib is None else round(serving.memory_gib * _GIB)
    return [
        ServingCase(
            cached.scheme,
            limit,
            memory,
            tuple(requests[: serving.count(limit)]),
            lengths,
            serving.step_tokens,
            cached.kv_bits,
        )
        for cached in setup.schemes
        for limit in limits
    ]


def run_to_measure(database: Database, keys: Sequence[str], resume: str | None) -> RunInfo:
    """Return a new run, or the one to resume. Raises UsageError if it has other cases."""
    if resume is None:
        return new_run(SUITE, "manual", keys)
    with database.session() as session:
        summary = queries.run_by_uuid_prefix(session, resume)
        check_same_work(summary, SUITE, current_commit())
        run = queries.run_info(session, summary.uuid)
    if run.plan != tuple(keys):
        raise UsageError(
            f"run {run.uuid[:8]} was begun with other options: repeat those, or start a new run"
        )
    return run


def stored_results(database: Database, run: RunInfo, kind: type[R]) -> dict[str, R]:
    """Stored decodes or servings of a run by case."""
    with database.session() as session:
        stored = queries.stored_records(session, kind, Filters(runs=(run.uuid,)))
        return {record.case: record for record in stored}


def measure_decodes(
    run: OpenRun,
    setup: Setup,
    cases: Sequence[DecodeCase],
    before: Mapping[str, DecodeRecord],
    on_record: Callable[[DecodeRecord], None],
) -> None:
    """Decode with exclusive use of the device; store each record, then call on_record.

    before: records of the run by case, whose processes are not repeated.

    Raises as measurement.decode_all, InfrastructureError if the device is not free in time.
    """
    with devices_alone(device_info(name).uuid for name in setup.devices):
        for record in measurement.decode_all(setup, cases, run.info, run.commit, dict(before)):
            _store(run, record)
            on_record(record)


def measure_servings(
    run: OpenRun,
    setup: Setup,
    cases: Sequence[ServingCase],
    on_record: Callable[[ServingRecord], None],
) -> None:
    """Serve with exclusive use of the device; store each record, then call on_record.

    Raises as measurement.serve_all, InfrastructureError if the device is not free in time.
    """
    if not cases:
        return
    with devices_alone(device_info(name).uuid for name in setup.devices):
        for record in measurement.serve_all(setup, cases, run.info, run.commit):
            _store(run, record)
            on_record(record)


def _store(run: OpenRun, record: DecodeRecord | ServingRecord) -> None:
    run.store(lambda session: add_records(session, [record]))
