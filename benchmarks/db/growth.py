"""Time and memory of the verbs that read a whole history, as the database grows.

    python benchmarks/db/growth.py FOLDER [--sizes 500x40,5000x400,5000x2000] [--verbs detect,home]
    python benchmarks/db/growth.py FOLDER --commits 1000,10000,100000

A size is the number of series times the number of nights; in a night half of the GPUs, and so half
of the series, are measured. Each database is made by fill.py in FOLDER, without raw samples, and
kept; later nights repeat its first ones with noise. Each verb runs in a process of its own:

- `night`: what a nightly run does with the history of its series: candidates, and change points
- `detect`: the change points of one series, as the command prints them
- `home`: the dashboard's first page, opened for the first time
- `export`: everything as Parquet

With --commits: `clone`, what a database learns of a repository at its first result, and `commit`,
what it learns at the result of one commit more. A tenth of the commits merge a branch.

Prints CPU seconds and peak memory of each, and exponents e of cost ~ results^e (or commits^e) from
the first size to the last.
"""

from __future__ import annotations

import argparse
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import fill
import made_up
from sqlalchemy import select

from flexq_bench.__main__ import main as command
from flexq_bench.ci.candidates import suspects_of
from flexq_bench.ci.change_points import store_change_points
from flexq_bench.db.engine import Session, open_database, upgrade
from flexq_bench.db.lines import known_history, store_ancestry
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.tables import Run
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE
from flexq_bench.db.writer import Writer
from flexq_bench.repository.ancestry import read_history
from flexq_bench.repository.git import git_output

_FIRST_NIGHTS = 40  # a round of what kernels go through
_CHANGED = {  # columns of a repeated measurement
    "uuid": "printf('%08x', :night) || substr(uuid, 9)",
    "run_id": ":run",
    "commit_id": ":commit",
    "created_at": "datetime(created_at, :later) || '.000000'",
    "median_us": "median_us * (1 + 1e-5 * ((7919 * id + 104729 * :night) % 1000 - 500))",
}
Costs = tuple[float, dict[str, tuple[float, float]]]  # size; CPU seconds and MiB by verb


def make(path: Path, series: int, nights: int) -> None:
    """Fill a database with this history, unless it is there."""
    if path.exists():
        return
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open_database(str(part), check_schema=False) as database:
        upgrade(database)
        with database.session() as session:
            fill.fill(session, min(nights, _FIRST_NIGHTS), series, with_samples=False)
        with database.session() as session:
            later = list(_later_nights(session, nights, series))
    with closing(sqlite3.connect(part)) as connection:
        _repeat(connection, later)
    part.rename(path)


def _later_nights(session: Session, nights: int, series: int) -> Iterator[dict[str, object]]:
    """Store commits and runs of the nights to repeat."""
    writer = Writer(session)
    runs = {run.uuid: run.id for run in session.scalars(select(Run))}
    places = fill.places_of(series)
    for night in range(_FIRST_NIGHTS, nights):
        commit = writer.commit(made_up.commit(night))
        run = fill.run_of(night, made_up.measured_in(night, places))
        again = night % _FIRST_NIGHTS
        yield {
            "night": night,
            "again": runs[made_up.identity("run", again)],
            "run": writer.run(run, commit),
            "commit": commit,
            "later": f"+{night - again} days",
        }
    writer.place_commits()  # on the main line: results at other commits are no history


def _repeat(connection: sqlite3.Connection, later: Sequence[Mapping[str, object]]) -> None:
    """Copy the measurements of first nights; indexes are made again at the end."""
    connection.execute("PRAGMA synchronous = off")
    found = "FROM sqlite_master WHERE tbl_name = 'measurement' AND type = 'index' AND sql <> ''"
    indexes = connection.execute(f"SELECT name, sql {found}").fetchall()
    rows = connection.execute("SELECT name FROM pragma_table_info('measurement')").fetchall()
    names = [name for (name,) in rows if name != "id"]
    values = ", ".join(_CHANGED.get(name, name) for name in names)
    for name, _ in indexes:
        connection.execute(f"DROP INDEX {name}")
    connection.execute("CREATE INDEX again ON measurement (run_id)")
    connection.executemany(
        f"INSERT INTO measurement ({', '.join(names)}) "
        f"SELECT {values} FROM measurement WHERE run_id = :again",
        later,
    )
    connection.execute("DROP INDEX again")
    for _, sql in indexes:
        connection.execute(sql)
    connection.commit()


def night(path: Path, nights: int) -> None:
    """Judge the last night against the history."""
    run, commit = made_up.identity("run", nights - 1), made_up.commit(nights - 1)
    gpu = made_up.measured_in(nights - 1, made_up.places())[0].gpu
    with open_database(str(path)) as database, database.session() as session:
        suspects_of(session, run, commit)
        store_change_points(session, run, made_up.device(gpu))


def make_repository(path: Path, commits: int) -> None:
    """Make a repository of so many commits, a tenth of them merges."""
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "main", path], check=True)
    lines = []
    for number in range(1, 1 + commits):
        lines += [f"commit refs/heads/main\nmark :{number}"]
        lines += [f"committer a <a@example.org> {1_700_000_000 + number} +0000\ndata 1\na"]
        if number % 10 == 0:
            lines += [f"from :{number - 1}\nmerge :{number - 5}"]
    stream = "\n".join([*lines, ""]).encode()
    subprocess.run(["git", "-C", path, "fast-import", "--quiet"], input=stream, check=True)


def learn(database: Path, repository: Path, *, measured: int) -> None:
    """Store what a clone knows at results of so many commits; the newest is one of them."""
    shas = git_output(repository, "rev-list", "HEAD").split()
    with open_database(str(database)) as opened, opened.session() as session:
        for sha in shas[:: len(shas) // measured]:
            Writer(session).commit(CommitInfo(sha, None, None, dirty=False, project="a"))
        history = read_history(repository, [shas[0]], "a", known_history(session, "a"))
        store_ancestry(session, history.ancestry, at=datetime.now(UTC))


def home() -> None:
    from pages import view  # its temporary folder is this process's own

    view("home", {})


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
        except Exception:
            traceback.print_exc()
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
    parser.add_argument("--verbs", default="night,detect,home,export")
    parser.add_argument("--commits", help="numbers of commits, in place of sizes")
    options = parser.parse_args()
    out = sys.stdout.write
    if options.commits:
        repositories(options.folder, [int(number) for number in options.commits.split(",")])
        return
    found: list[Costs] = []
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
            "home": home,
            "export": partial(_verb, "db", "export", str(path.with_suffix(".parquet")), *database),
        }
        os.environ[ENVIRONMENT_VARIABLE] = str(path)
        costs = {}
        for name in options.verbs.split(","):
            costs[name] = measured(verbs[name])
            seconds, memory = costs[name]
            place = f"{series:,} | {nights} | {series * nights // 2:,}"
            out(f"| {place} | {path.stat().st_size / 1e6:.0f} | {name} | {seconds:.2f} | ")
            out(f"{memory:.0f} |\n")
            sys.stdout.flush()
        found.append((series * nights / 2, costs))
        sys.stderr.write(f"{size}: filled in {filled:.0f} s\n")
    print_exponents(found, "results")


def repositories(folder: Path, sizes: Sequence[int]) -> None:
    """Measure repositories of these numbers of commits; print the table."""
    out, found = sys.stdout.write, []
    out("| commits | step | CPU seconds | peak MiB |\n| ---: | --- | ---: | ---: |\n")
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            repository, database = Path(scratch, "clone"), Path(scratch, "a.sqlite")
            make_repository(repository, size)
            open_database(str(database)).close()
            costs = {"clone": measured(partial(learn, database, repository, measured=size // 10))}
            commit = ("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet")
            git_output(repository, *commit, "--allow-empty", "--message", "one more")
            costs["commit"] = measured(partial(learn, database, repository, measured=1))
        for name, (seconds, memory) in costs.items():
            out(f"| {size:,} | {name} | {seconds:.2f} | {memory:.0f} |\n")
        sys.stdout.flush()
        found.append((size, costs))
    print_exponents(found, "commits")


def print_exponents(found: Sequence[Costs], unit: str) -> None:
    """Print the growth of time and memory from the first size to the last."""
    (first, least), (last, most) = found[0], found[-1]
    for name in least if last != first else ():
        powers = [
            math.log(b / a) / math.log(last / first)
            for a, b in zip(least[name], most[name], strict=True)
        ]
        times, memory = (f"{unit}^{power:.2f}" for power in powers)
        sys.stdout.write(f"{name}: time ~ {times}, memory ~ {memory}\n")


if __name__ == "__main__":
    main()
