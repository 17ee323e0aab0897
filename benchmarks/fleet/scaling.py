"""Scaling of a nightly run from one GPU to all GPUs of this machine.

    python benchmarks/fleet/scaling.py --out FOLDER

Measures throughput, agreement between GPUs, device offsets and utilization. The processes of one
fleet are used throughout: first for a short run that every GPU measures (`offsets`, also a
warm-up), then for the whole suite on all GPUs, on half of them, and so on down to one. The
database, the records and summary.json are written to FOLDER as soon as they are available, so an
interrupted call leaves its results.

The speed-up is the ratio of cases per minute of two runs, each from its start to its last result;
as a check, also the ratio of the workers' time per case. Limits: at least 1.9 times one GPU's cases
per minute on two GPUs and 3.7 times on four, every series within 1.5 %, 60 % of the workers' time
spent in cases, less than 10 s of a run spent outside of cases.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from narrowing import NarrowingWorkers
from prebuild import architecture, builds_of, compile_all

from flexq_bench.ci.nightly import Rules, conclude_nights, measure_night
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.exchange import write_records
from flexq_bench.db.records import Record
from flexq_bench.errors import CancelledError, FlexqError
from flexq_bench.fleet import RayPool, Times
from flexq_bench.measure import Tuning
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.plan import build_plan
from flexq_bench.workloads.probes import EMPTY_KERNEL
from flexq_bench.workloads.suite import Suite
from flexq_bench.workloads.suites import load_suite

SUITE = Path(__file__).with_name("scaling.toml")
MAX_DIFFERENCE = 0.015
MIN_USE = 0.6
MAX_OUTSIDE_CASES_S = 10.0
MIN_SPEEDUP = {2: 1.9, 4: 3.7}
TIMES = Times(start=90, case=60, beat=2, lease=20, device=30, scan=5, database=60)


@dataclass
class Night:
    """A night as it went. seconds: from its start to each result, in the order of results."""

    name: str
    gpus: int
    began: float = field(default_factory=time.time)
    seconds: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def took(self, record: Record) -> None:
        self.seconds.append(time.time() - self.began)
        self.records.append(record)

    @property
    def cases(self) -> dict[str, Record]:
        return {record.case: record for record in self.records if record.kernel != EMPTY_KERNEL}

    def summary(self, load: Sequence[tuple[float, int, float]]) -> dict[str, Any]:
        """in_cases and sampling: shares of workers' time."""
        if not self.records:
            return {"name": self.name, "gpus": self.gpus, "cases": 0}
        wall = self.seconds[-1]
        worked = self.gpus * wall
        here = [
            (gpu, share) for time_s, gpu, share in load if self.began <= time_s <= self.began + wall
        ]
        running = statistics.fmean(share for _, share in here) / 100 if here else None
        return {
            "name": self.name,
            "gpus": self.gpus,
            "cases": len(self.records),
            "wall_s": wall,
            "per_minute": 60 * len(self.records) / wall,
            "beside_cases_s": wall - sum(map(_wall, self.records)) / self.gpus,
            "in_cases": sum(map(_wall, self.records)) / worked,
            "sampling": sum(map(_sampled, self.records)) / worked,
            # Share of the night's GPUs; idle GPUs add nothing. None: no nvidia-smi.
            "kernels_running": running and running * len({gpu for gpu, _ in here}) / self.gpus,
            "last_results_s": self.seconds[-8:],
            "by_device": {
                device: sum(record.device.uuid == device for record in self.records)
                for device in sorted({record.device.uuid for record in self.records})
            },
            "statuses": {
                status: sum(record.status == status for record in self.records)
                for status in sorted({record.status for record in self.records})
            },
        }


class Bench:
    """The nights on one fleet, and what they come to so far."""

    def __init__(self, database: Database, out: Path, arguments: argparse.Namespace) -> None:
        self._database, self._out, self._arguments = database, out, arguments
        self.nights: dict[str, Night] = {}
        self.summary: dict[str, Any] = {}

    def night(self, pool: RayPool, name: str, suite: Suite, gpus: int, *, repeat: int = 1) -> None:
        limit = self._arguments.night_seconds
        night = self.nights[name] = Night(name, gpus)

        def on_record(record: Record) -> None:
            night.took(record)
            if night.seconds[-1] > limit:
                raise CancelledError(f"{limit:.0f} s are over")

        rules = Rules(name, None, canaries=0, alerting=False)
        commit = current_commit()
        pool.repeat = repeat
        try:
            begun = measure_night(
                self._database,
                pool,
                suite,
                commit,
                rules,
                progress=lambda _: nullcontext(on_record),
            )
            if gpus > 1 and repeat == 1:
                reports = conclude_nights(
                    self._database,
                    pool,
                    begun,
                    commit,
                    rules,
                    progress=lambda jobs: nullcontext(lambda job: None),
                )
                self.summary.setdefault("reports", []).extend(map(asdict, reports))
        except CancelledError:
            pass  # the night is stored as interrupted, with what it has
        finally:
            self.save()

    def save(self) -> None:
        """Records and summary of all nights so far."""
        records = [record for night in self.nights.values() for record in night.records]
        if records:
            write_records(self._out / "records.parquet", records)
        load = read_load(self._out / "load.csv")
        self.summary["nights"] = [night.summary(load) for night in self.nights.values()]
        with self._database.session() as session:
            self.summary["offsets"] = [
                {**asdict(row), "computed_at": str(row.computed_at)}
                for row in queries.device_offsets(session)
            ]
        text = json.dumps(self.summary, indent=2, default=str)
        (self._out / "summary.json").write_text(text + "\n")

    def show(self) -> None:
        for night in self.summary["nights"]:
            if night["cases"]:
                running = night["kernels_running"]
                seen = "" if running is None else f", kernels running {running:.0%}"
                say(
                    f"{night['name']:8} {night['gpus']} GPUs: {night['cases']} cases in "
                    f"{night['wall_s']:.1f} s, {night['per_minute']:.1f} a minute; in cases "
                    f"{night['in_cases']:.0%}, sampling {night['sampling']:.0%}{seen}"
                )
        whole = [night for night in self.nights.values() if night.name != "offsets"]
        for night in whole[:-1]:
            self._show_comparison(whole[-1], night)
        for row in self.summary["offsets"]:
            say(
                f"  offset of {row['device']}: {row['log_offset']:+.2%} "
                f"({row['low']:+.2%} to {row['high']:+.2%}), {row['cases']} cases"
            )

    def _show_comparison(self, single: Night, several: Night) -> None:
        summaries = {night["name"]: night for night in self.summary["nights"]}
        few, many = summaries[single.name], summaries[several.name]
        both = single.cases.keys() & several.cases.keys()
        if not both:
            return
        pairs = {key: (single.cases[key], several.cases[key]) for key in both}
        say(f"{several.name} against {single.name}, {len(pairs)} cases of both:")
        speedup = many["per_minute"] / few["per_minute"]
        least = MIN_SPEEDUP.get(several.gpus, 0.925 * several.gpus) / single.gpus
        longer = sum(_wall(b) for _, b in pairs.values()) / sum(_wall(a) for a, _ in pairs.values())
        in_cases = several.gpus / single.gpus * many["in_cases"] / few["in_cases"] / longer
        say(
            f"  {speedup:.2f}x (at least {least:.2f}): {_yes(speedup >= least)}; "
            f"by the time in cases {in_cases:.2f}x"
        )
        use, outside_s = many["in_cases"], many["beside_cases_s"]
        say(f"  in cases {use:.0%} (at least {MIN_USE:.0%}): {_yes(use >= MIN_USE)}")
        little = _yes(outside_s < MAX_OUTSIDE_CASES_S)
        say(f"  outside cases {outside_s:.1f} s (below {MAX_OUTSIDE_CASES_S:.0f}): {little}")
        apart = {
            key: b.median_us / a.median_us - 1
            for key, (a, b) in pairs.items()
            if a.median_us is not None and b.median_us is not None
        }
        unequal = sum(abs(change) > MAX_DIFFERENCE for change in apart.values())
        middle = statistics.median(map(abs, apart.values()))
        say(
            f"  {len(apart)} series, {unequal} more than {MAX_DIFFERENCE:.1%} apart: "
            f"{_yes(not unequal)}; half within {middle:.2%}; the most:"
        )
        for key in sorted(apart, key=lambda key: -abs(apart[key]))[:5]:
            say(f"    {key}: {single.cases[key].median_us:.2f} us, {apart[key]:+.2%}")


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def read_load(path: Path) -> list[tuple[float, int, float]]:
    """Seconds since 1970, the GPU's number and the share of time that a kernel ran on it, in %."""
    readings = []
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            time_s = datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            readings.append((time_s, int(cells[1]), float(cells[2])))
        except (ValueError, IndexError):
            continue  # a line that was cut off, or a value that the driver doesn't tell
    return readings


@contextmanager
def load_watched(path: Path) -> Iterator[None]:
    """nvidia-smi's view of the GPUs in a file, twice a second; nothing where there is none."""
    fields = "timestamp,index,utilization.gpu,clocks.sm,power.draw,temperature.gpu"
    query = (f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--loop-ms=500")
    command = ("nvidia-smi", *query)
    try:
        with path.open("w") as file, subprocess.Popen(command, stdout=file) as process:
            try:
                yield
            finally:
                process.terminate()
    except FileNotFoundError:
        yield


def _wall(record: Record) -> float:
    return float(record.extra.get("wall_s", 0))


def _sampled(record: Record) -> float:
    return float(record.extra.get("elapsed_s", 0))


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def halves(gpus: int) -> Iterator[int]:
    """Yield the numbers of GPUs: all, half of them, and so on down to 1."""
    while gpus:
        yield gpus
        gpus //= 2


def prepare(suite: Suite) -> None:
    arch = architecture()
    began = time.perf_counter()
    major_minor = divmod(int(arch.removeprefix("sm_")), 10)
    builds = builds_of(build_plan(suite, "cuda", major_minor).cases, arch)
    problems = compile_all(builds, arch)
    say(f"{len(builds)} builds for {arch} in {time.perf_counter() - began:.1f} s {problems}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", default=str(SUITE))
    parser.add_argument("--on", type=int, nargs="+", help="numbers of GPUs, falling, the last 1")
    parser.add_argument("--night-seconds", type=float, default=180.0, help="a night's end")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    suite = load_suite(arguments.suite)
    if arguments.backend == "cuda":
        prepare(suite)
    workers = NarrowingWorkers(
        "local", backend=arguments.backend, seed=0, tuning=Tuning.NONE, times=TIMES
    )
    began = time.perf_counter()
    with open_database(str(out / "fleet.sqlite")) as database, load_watched(out / "load.csv"):
        bench = Bench(database, out, arguments)
        try:
            with RayPool(database, workers, current_commit(), TIMES).opened() as pool:
                gpus = sum(kind.workers for kind in pool.kinds)
                say(f"{gpus} workers after {time.perf_counter() - began:.1f} s")
                some = suite.restrict(layers=suite.layers[:1], m=suite.m[:3])
                bench.night(pool, "offsets", some, gpus, repeat=gpus)
                for few in arguments.on or halves(gpus):
                    workers.narrow(few)
                    pool.refresh()  # those left out go before there is work for them
                    bench.night(pool, f"{few} GPUs", suite, few)
        except (FlexqError, KeyboardInterrupt) as error:
            say(f"ended early: {type(error).__name__} {error}")
            return 1
        finally:
            bench.save()
            bench.show()
            say(f"done after {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
