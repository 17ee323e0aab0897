"""Time and memory of the verbs that read a whole history, as the database grows.

    python benchmarks/db/growth.py FOLDER [--sizes 500x40,500x400,5000x40,5000x400]

A size is the number of series times the number of nights; in a night half of the GPUs, and so half
of the series, are measured. Each database is made by fill.py in FOLDER and kept. Each verb runs in
a process of its own:

- `night`: what a nightly run does with the history of its series: candidates, and change points
- `detect`: the change points of one series, as the command prints them
- `home`: the dashboard's first page, opened for the first time
- `export`: everything as Parquet, without raw samples

Prints CPU seconds and peak memory of each, and exponents e of cost ~ results^e from the first
size to the last.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fill
import made_up
from pages import view

from flexq_bench.__main__ import main as command
from flexq_bench.ci.candidates import suspects_of
from flexq_bench.ci.change_points import store_change_points
from flexq_bench.db.engine import open_database, upgrade
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE

_SAMPLES = 10  # of a measurement: fill.py's 100 are of another question
_SERIES_PER_TOKENS = 100  # that a number of tokens adds


def make(path: Path, series: int, nights: int) -> None:
    """Fill a database with this history, unless it is there."""
    made_up.SAMPLES = _SAMPLES
    made_up.TOKENS = tuple(range(1, 1 + series // _SERIES_PER_TOKENS))
    if path.exists():
        return
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open_database(str(part), check_schema=False) as database:
        upgrade(database)
        with database.session() as session:
            fill.fill(session, nights)
    part.rename(path)


def night(path: Path, nights: int) -> None:
    """Judge the last night against the history."""
    run, commit = made_up.identity("run", nights - 1), made_up.commit(nights - 1)
    gpu = made_up.measured_in(nights - 1, made_up.places())[0].gpu
    with open_database(str(path)) as database, database.session() as session:
        suspects_of(session, run, commit)
        store_change_points(session, run, made_up.device(gpu))


def _verb(*arguments: str) -> None:
    sys.argv = ["flexq-bench", *arguments]
    command()


def measured(call: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds and peak memory in MiB of a call in a fork of this process."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            call()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"it failed with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Fill and measure every size; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", default="500x40,500x400,5000x40,5000x400")
    options = parser.parse_args()
    out, found = sys.stdout.write, []
    out("| series | nights | results | MB | verb | CPU seconds | peak MiB |\n")
    out("| ---: | ---: | ---: | ---: | --- | ---: | ---: |\n")
    for size in options.sizes.split(","):
        series, nights = map(int, size.split("x"))
        path = options.folder / f"{size}.sqlite"
        started = time.perf_counter()
        make(path, series, nights)
        filled = time.perf_counter() - started
        database = ("--db", str(path))
        verbs: dict[str, Callable[[], None]] = {
            "night": partial(night, path, nights),
            "detect": partial(_verb, "detect", "1", *database),
            "home": partial(view, "home", {}),
            "export": partial(_verb, "db", "export", str(path.with_suffix(".parquet")), *database),
        }
        os.environ[ENVIRONMENT_VARIABLE] = str(path)
        costs = {}
        for name, call in verbs.items():
            costs[name] = measured(call)
            seconds, memory = costs[name]
            place = f"{series:,} | {nights} | {series * nights // 2:,}"
            out(f"| {place} | {path.stat().st_size / 1e6:.0f} | {name} | {seconds:.2f} | ")
            out(f"{memory:.0f} |\n")
            sys.stdout.flush()
        found.append((series * nights / 2, costs))
        sys.stderr.write(f"{size}: filled in {filled:.0f} s\n")
    (first, least), (last, most) = found[0], found[-1]
    for name in least:
        growth = [
            math.log(b / a) / math.log(last / first)
            for a, b in zip(least[name], most[name], strict=True)
        ]
        out(f"{name}: time ~ results^{growth[0]:.2f}, memory ~ results^{growth[1]:.2f}\n")


if __name__ == "__main__":
    main()
