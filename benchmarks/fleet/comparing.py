"""Time of a night's comparisons on one GPU of this machine and on several, without a cluster.

    python benchmarks/fleet/comparing.py --devices 2,1 [--base COMMIT] [--head COMMIT]

Cases are stored as the jobs that a night stores and carried out by the pool of `nightly` and
`compare`. They are divided between the most GPUs of a row, and every case gets the same number of
pairs of processes, so that each row is of the same work; a row is printed when it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.fleet import add_jobs
from flexq_bench.fleet.compare_jobs import (
    CompareJob,
    ComparisonWork,
    job_infos,
    stored_comparisons,
)
from flexq_bench.fleet.local_pool import LocalPool
from flexq_bench.measure import Meter
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.measure.device import devices_from
from flexq_bench.repository.provenance import ROOT, commit_at
from flexq_bench.runs.lifecycle import new_run, open_run
from flexq_bench.runs.process_meter import InProcessMeter
from flexq_bench.workloads.case import Case


def compared_on(
    database: Database,
    names: tuple[str, ...],
    job: CompareJob,
    rules: InterleaveRules,
    parts: int,
) -> dict[str, object]:
    """Compare the cases of a job in so many parts on devices; return a row about it."""
    meter = InProcessMeter(Meter(names[0]))
    pool = LocalPool(database, meter, names[0], others=names[1:])
    [kind] = pool.kinds
    with open_run(
        database, new_run("comparing", "benchmark", ()), commit_at(ROOT, job.head)
    ) as run:
        uuid = run.info.uuid
        with database.session() as session:
            add_jobs(session, uuid, job_infos([job], parts))
        began = time.monotonic()
        pool.compare([ComparisonWork(uuid, kind.gpu, ROOT, rules)], lambda _: None)
        seconds = time.monotonic() - began
    with database.session() as session:
        jobs = queries.jobs_of(session, uuid, kind="compare")
        outcomes = queries.comparison_outcomes(session, uuid)
    asked = {row.id: CompareJob.from_data(row.content or {}) for row in jobs}
    stored = stored_comparisons(asked, outcomes)
    blocks = sum(np.size(one.comparison.base_us) for one in stored.comparisons)
    return {
        "gpu": kind.gpu,
        "devices": kind.devices,
        "cases": len(stored.comparisons),
        "jobs": dict(Counter(row.state for row in jobs)),
        "by_device": dict(Counter(device.uuid for device in stored.devices)),
        "verdicts": dict(Counter(one.confirmation.verdict.value for one in stored.comparisons)),
        "blocks": blocks,
        "seconds": round(seconds, 2),
        "blocks_a_second": round(blocks / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="2,1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--base", default="HEAD")
    parser.add_argument("--head", default="HEAD")
    parser.add_argument("--kernels", default="flexq-imma-w6a8,cublas-fp16")
    parser.add_argument("--m", default="1,4,16,64")
    parser.add_argument("--shapes", default="4096x4096,11008x4096")
    parser.add_argument("--pairs", type=int, default=InterleaveRules().processes)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = (options.m, options.shapes, options.kernels)
    cases = tuple(
        Case.from_key(f"{kernel} gemm cold m{m}n{n}k{k}")
        for m, shape, kernel in product(*(text.split(",") for text in parts))
        for n, k in [shape.split("x")]
    )
    base, head = (commit_at(ROOT, commit).sha for commit in (options.base, options.head))
    rules = InterleaveRules(processes=options.pairs, looks=1, suffices=lambda *_: False)
    rows, counts = [], [int(count) for count in options.devices.split(",")]
    with TemporaryDirectory() as folder, open_database(f"{folder}/jobs.sqlite") as database:
        job = CompareJob(base, head, cases)
        for count in counts:
            names = devices_from(options.device, count)
            rows.append(compared_on(database, names, job, rules, max(counts)))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
            if options.out is not None:
                options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
