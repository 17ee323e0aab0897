"""Fill an empty database with synthetic results of a fleet in 400 nights: 10 million samples.

100,000 measurements of 500 series with 100 samples each, their runs and plans, a decision on each
with its evidence, 20 alerts of 50 decisions, a job for each case, and scores and decodes of models
at 20 releases. Decisions without an alert repeat one computed verdict: `same`.

    python benchmarks/db/fill.py large.sqlite
    python benchmarks/db/fill.py postgresql://USER@HOST/DATABASE
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import made_up
import numpy as np
from made_up import Place
from other_rows import fill_fleet, fill_models
from sqlalchemy import insert, select, text

from flexq_bench.db.decisions import FalseAlarmInfo, add_false_alarm_rate
from flexq_bench.db.engine import Session, open_database, revision_of, upgrade
from flexq_bench.db.identity import canonical_json, fingerprint
from flexq_bench.db.records import RunInfo
from flexq_bench.db.samples import pack
from flexq_bench.db.tables import (
    Decision,
    DecisionEvidence,
    Environment,
    Epoch,
    Measurement,
    Noise,
    Sample,
)
from flexq_bench.db.writer import Writer
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts import alert_rule, judge_together
from flexq_bench.verdicts.nightly import record_night

NIGHTS = 400
SERIES = 500
DRIVERS = ("570.86", "580.65")  # one after the other: each opens an epoch in every series


def fill(session: Session, nights: int, series: int = SERIES, *, with_samples: bool = True) -> int:
    """Store everything in one transaction; return the number of measurements.

    with_samples: with raw samples and a decision on each measurement, most of the time it takes.
    """
    places = places_of(series)
    writer = Writer(session)
    machines = {gpu: Machine("cuda", made_up.device(gpu)) for gpu in made_up.GPUS}
    ids_of = {p: writer.series(machines[p.gpu].series_of(p.case)) for p in places}
    devices = {gpu: writer.device(machine.device) for gpu, machine in machines.items()}
    environments = _environments(session)
    epochs: dict[tuple[int, int], int] = {}
    _alerts(session, places, machines, nights)
    verdict, evidence = _one_verdict(places[0])
    stored = 0
    runs = []
    for night in range(nights):
        measured = made_up.measured_in(night, places)
        at = made_up.began(night)
        commit_id = writer.commit(made_up.commit(night))
        runs.append((run_of(night, measured), night))
        run_id = writer.run(runs[-1][0], commit_id)
        environment = environments[2 * night // nights]
        for place in measured:
            key = (ids_of[place], environment)
            if key not in epochs:
                epochs[key] = _epoch(session, *key, run_id, at)
        medians = made_up.medians(night, measured)
        rows = [
            _measurement(place, night, i, float(median))
            | {
                "run_id": run_id,
                "series_id": ids_of[place],
                "epoch_id": epochs[ids_of[place], environment],
                "commit_id": commit_id,
                "device_id": devices[place.gpu],
            }
            for i, (place, median) in enumerate(zip(measured, medians, strict=True))
        ]
        ids = session.scalars(
            insert(Measurement).returning(Measurement.id, sort_by_parameter_order=True), rows
        ).all()
        if with_samples:
            session.execute(insert(Sample), _samples(night, ids, medians))
        if night and with_samples:
            before = writer.commit(made_up.commit(night - 1))
            # What a commit makes slower has verdicts of its own, with its alert; what one mends
            # was not compared.
            moved = (made_up.slow_kernel(night), made_up.mended_kernel(night))
            steady = [p for p in measured if p.case.kernel not in moved]
            _decide(session, night, [ids_of[p] for p in steady], (before, commit_id), verdict,
                    evidence)  # fmt: skip
        stored += len(rows)
    _aa_calibration(session, list(ids_of.values()), nights)
    fill_fleet(session, runs)
    fill_models(session, nights)
    return stored


def places_of(series: int) -> list[Place]:
    return made_up.places(made_up.TOKENS if series == SERIES else range(1, series // 100 + 1))


def _environments(session: Session) -> list[int]:
    contents = [{"driver": driver, "torch": "2.13.0"} for driver in DRIVERS]
    rows = [{"content": content, "fingerprint": fingerprint(content)} for content in contents]
    return list(session.scalars(insert(Environment).returning(Environment.id), rows))


def _epoch(session: Session, series: int, environment: int, run: int, at: datetime) -> int:
    row = {
        "series_id": series,
        "environment_id": environment,
        "first_run_id": run,
        "opened_at": at,
    }
    return int(session.scalars(insert(Epoch).values(row).returning(Epoch.id)).one())


def run_of(night: int, measured: Sequence[Place]) -> RunInfo:
    name = made_up.identity("run", night)
    plan = tuple(dict.fromkeys(place.case.key for place in measured))
    # One night in fifty was stopped before its last case.
    missing = () if night % 50 else ("flexq-w6a6 gemm cold m9999n4096k4096",)
    status = "interrupted" if missing else "complete"
    at = made_up.began(night).isoformat()
    return RunInfo(name, "nightly", "nightly", status, at, name, plan + missing)


def _measurement(place: Place, night: int, position: int, median: float) -> dict[str, Any]:
    case = place.case
    return {
        "uuid": made_up.identity("measurement", night, position),
        "case_key": case.key,
        "created_at": made_up.began(night) + timedelta(seconds=2 * position),
        "model": place.model,
        "layer": place.layer,
        "status": "ok",
        "detail": "",
        "accepted": True,
        "median_us": median,
        "ci_low_us": 0.998 * median,
        "ci_high_us": 1.002 * median,
        "n_samples": made_up.SAMPLES,
        "n_invalid": 0,
        "placement_medians_us": [median] * made_up.PLACEMENTS,
        "floor_us": place.floor_us,
        "pct_of_floor": 100 * place.floor_us / median,
        "launch_us": 1.5,
        "tops": 2e-6 * case.gemm.m * case.gemm.n * case.gemm.k / median,
        "max_rel_error": 0.0,
        "exact": True,
        "config": {"block_n": 64},
        "binary_hash": f"binary {night // 10}",
        "seed": 0,
        "sm_clock_mhz": 1980.0,
        "mem_clock_mhz": 3201.0,
        "power_w": 310.0,
        "temperature_c": 45.0,
        "throttle_mask": 0,
        "extra": {},
    }


def _samples(night: int, ids: Sequence[int], medians: np.ndarray) -> list[dict[str, Any]]:
    rows = []
    for measurement_id, values in zip(ids, made_up.samples(night, medians), strict=True):
        placements = values.tolist()
        counts = [len(placement) for placement in placements]
        rows.append(
            {
                "measurement_id": measurement_id,
                "count": sum(counts),
                "placement_counts": counts,
                "data": pack(placements),
            }
        )
    return rows


def _alerts(session: Session, of: list[Place], machines: dict[str, Machine], nights: int) -> None:
    for night in range(1, nights):
        if made_up.slow_kernel(night) is None:
            continue
        commits = {c.sha: c for c in (made_up.commit(night - 1), made_up.commit(night))}
        for gpu, machine in machines.items():
            here = [p for p in made_up.measured_in(night, of) if p.gpu == gpu]
            found = list(made_up.slow_comparisons(night, here))
            if found:
                at = made_up.began(night) + timedelta(hours=2)
                record_night(session, found, machine, commits, alerting=True, at=at)


def _one_verdict(place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of a decision on two commits that are alike, and that of its evidence."""
    compared = made_up.compared(place.case, 1, 0.0)
    (judged,) = judge_together([compared], noise_floors=[0.0], weight_bits=[6])
    found, flat = judged.confirmation, judged.evidence.as_dict()
    verdict = {
        "watched": True,
        "detector": alert_rule.DETECTOR,
        "detector_version": alert_rule.DETECTOR_VERSION,
        "parameters": dict(alert_rule.PARAMETERS),
        "input_hash": fingerprint(flat),
        "verdict": found.verdict.value,
        "cause": found.cause.value,
        "reason": found.reason,
        "log_ratio": found.log_ratio,
        "log_ratio_low": found.low,
        "log_ratio_high": found.high,
    }
    return verdict, {"data": zlib.compress(canonical_json(flat).encode())}


def _decide(
    session: Session,
    night: int,
    series: Sequence[int],
    commits: tuple[int, int],
    verdict: dict[str, Any],
    evidence: dict[str, Any],
) -> None:
    base, head = commits
    at = made_up.began(night) + timedelta(hours=3)
    rows = [
        verdict
        | {
            "uuid": made_up.identity("decision", night, series_id),
            "series_id": series_id,
            "base_commit_id": base,
            "head_commit_id": head,
            "created_at": at,
        }
        for series_id in series
    ]
    ids = session.scalars(insert(Decision).returning(Decision.id), rows).all()
    session.execute(
        insert(DecisionEvidence), [evidence | {"decision_id": decision_id} for decision_id in ids]
    )


def _aa_calibration(session: Session, series: Sequence[int], nights: int) -> None:
    at = made_up.began(nights)
    row = {
        "computed_at": at,
        "input_hash": "made up",
        "comparisons": 12,
        "placements": 72,
        "blocks": 144,
        "block_sigma": 0.0003,
        "placement_sigma": 0.001,
        "comparison_sigma": 0.001,
        "estimate_sigma": 0.0005,
        "noise_floor": 0.002,
        "smallest_step": 0.004,
    }
    session.execute(insert(Noise), [row | {"series_id": series_id} for series_id in series])
    for night in range(nights):
        until = made_up.began(night)
        names = tuple(made_up.identity("canary", night - back) for back in range(30))
        rate = FalseAlarmInfo(made_up.FIRST_NIGHT, until, names, 0, 0.0, 0.0, 0.116, 0.95)
        add_false_alarm_rate(session, rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="a path or URL; empty, or not there yet")
    parser.add_argument("--nights", type=int, default=NIGHTS)
    parser.add_argument("--series", type=int, default=SERIES, help="a multiple of 100")
    parser.add_argument(
        "--no-samples",
        dest="with_samples",
        action="store_false",
        help="without raw samples and without decisions on steady series: four times as fast",
    )
    options = parser.parse_args()
    start = time.perf_counter()
    with open_database(options.database, check_schema=False) as database:
        if revision_of(database) is None:
            upgrade(database)
        with database.session() as session:
            if session.scalar(select(Measurement.id).limit(1)) is not None:
                sys.exit(f"{database.url} holds results: name an empty database")
            stored = fill(
                session, options.nights, options.series, with_samples=options.with_samples
            )
        if database.path is None:  # what a server does by itself within minutes
            with database.session() as session:
                session.execute(text("ANALYZE"))
    seconds = time.perf_counter() - start
    samples = stored * made_up.SAMPLES if options.with_samples else 0
    sys.stdout.write(f"{stored:,} measurements, {samples:,} samples in {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
