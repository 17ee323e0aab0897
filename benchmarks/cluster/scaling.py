"""A nightly on one GPU and on several of one host: throughput, agreement, offsets, use of the GPU.

    python benchmarks/cluster/scaling.py --gpus 2 --out FOLDER

Three nights of scaling.toml: one on all GPUs that only fills the caches of compiled kernels, one on
the first GPU, one on all. Then a few cases on every GPU, for the offsets between them. Databases
and records stay in FOLDER. Limits: at least 0.95 (2 GPUs) or 0.925 (4) of N times one GPU's cases
a minute, every series within 1.5 %, 60 % of the workers' time spent in cases.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from db import queries
from db.engine import open_database

SUITE = Path(__file__).with_name("scaling.toml")
WITHIN = 0.015
LEAST_USE = 0.6
LEAST_SPEEDUP = {2: 1.9, 4: 3.7}


@dataclass(frozen=True)
class Night:
    """cases a minute from the first worker's start to work until the last result; medians by case.

    in_cases: share of the workers' time, while there was work, that they spent in cases.
    sampling: share that was sampling alone, without checks, warm-up and set-up.
    """

    per_minute: float
    medians: dict[str, float]
    in_cases: float
    sampling: float


def command(*arguments: str, gpus: int) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    base = (sys.executable, "-m", "flexq_bench.cli")
    began = time.perf_counter()
    ended = subprocess.run((*base, *arguments), env={**os.environ, **visible}, check=False)
    print(  # noqa: T201
        f"{' '.join(arguments[:2])} on {gpus}: exit {ended.returncode}, "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )


def measure(folder: Path, name: str, gpus: int, suite: str, backend: str) -> Night:
    path = folder / f"{name}.sqlite"
    fleet = ("--cluster", "local", "--backend", backend, "--no-tune", "--db", str(path))
    command("nightly", suite, *fleet, "--canaries", "0", "--backfill", "0", gpus=gpus)
    records = folder / f"{name}.jsonl.gz"
    if not records.exists():
        command("db", "export", str(records), "--db", str(path), gpus=gpus)
    return read(path)


def read(path: Path) -> Night:
    with open_database(str(path), read_only=True) as database, database.session() as session:
        [run, *_] = queries.runs(session, limit=1)
        records = list(queries.run_records(session, run.uuid))
        workers = queries.workers(session)
    assert run.finished_at is not None
    began = max(worker.started_at for worker in workers)
    wall = (run.finished_at - began).total_seconds()
    sampled = sum(float(record.extra.get("elapsed_s", 0)) for record in records)
    return Night(
        60 * len(records) / wall,
        {record.case: record.median_us for record in records if record.median_us is not None},
        sum(worker.measuring_s for worker in workers) / (wall * len(workers)),
        sampled / (wall * len(workers)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", default=str(SUITE))
    parser.add_argument("--kernels", default="cublas-fp16", help="what the offsets are measured of")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure(arguments.out, "warm", arguments.gpus, arguments.suite, arguments.backend)
    one = measure(arguments.out, "one", 1, arguments.suite, arguments.backend)
    several = measure(arguments.out, "several", arguments.gpus, arguments.suite, arguments.backend)
    offsets = arguments.out / "offsets.sqlite"
    command(
        *(
            "run",
            arguments.suite,
            "--kernels",
            arguments.kernels,
            "--no-tune",
            "--cluster",
            "local",
        ),
        *("--backend", arguments.backend, "--repeat", str(arguments.gpus), "--db", str(offsets)),
        gpus=arguments.gpus,
    )
    speedup = several.per_minute / one.per_minute
    wanted = LEAST_SPEEDUP.get(arguments.gpus, 0.925 * arguments.gpus)
    apart = {
        case: several.medians[case] / one.medians[case] - 1
        for case in one.medians.keys() & several.medians.keys()
    }
    print(f"one GPU: {one.per_minute:.1f} cases a minute")  # noqa: T201
    print(  # noqa: T201
        f"{arguments.gpus} GPUs: {several.per_minute:.1f} cases a minute, "
        f"{speedup:.2f}x (at least {wanted}): {'yes' if speedup >= wanted else 'NO'}"
    )
    print(  # noqa: T201
        f"in cases {several.in_cases:.0%} of the workers' time (at least {LEAST_USE:.0%}): "
        f"{'yes' if several.in_cases >= LEAST_USE else 'NO'}; sampling alone {several.sampling:.0%}"
    )
    worst = sorted(apart.items(), key=lambda item: -abs(item[1]))
    outside = [item for item in worst if abs(item[1]) > WITHIN]
    print(f"{len(apart)} series, {len(outside)} differ by more than {WITHIN:.1%}; the most:")  # noqa: T201
    for case, change in worst[:8]:
        print(f"  {case}: {one.medians[case]:.2f} us, {change:+.2%}")  # noqa: T201
    with open_database(str(offsets), read_only=True) as database, database.session() as session:
        for row in queries.device_offsets(session):
            print(  # noqa: T201
                f"  {row.device}: {row.log_offset:+.2%} ({row.low:+.2%} to {row.high:+.2%}), "
                f"{row.cases} cases"
            )


if __name__ == "__main__":
    main()
