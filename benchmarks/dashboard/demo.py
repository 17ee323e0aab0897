"""Make the database of `flexq-bench demo` from real measurements.

    python benchmarks/dashboard/demo.py FOLDER

On this machine's CPU, nights of a repository (examples/byo/make_repository.py) are measured in
which one commit makes kernels slower, another reverts it, and a third makes them wrong; then gates
of these commits, a bisection, and checkpoints of the tiny LLaMA of examples/models: quantized,
evaluated, judged by the accuracy gate and decoded. Records of examples/h200 and examples/h100 are
added. Nights were measured one after the other: so that a week can be compared, each is dated a day
after the one before. Times are what was measured. Samples of imported records are left out, for the
size. FOLDER keeps what was measured, and a second call goes on from there; half an hour on two
cores.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "dashboard" / "demo.sqlite.xz"
BYO = ROOT / "examples" / "byo"
TINY = ROOT / "examples" / "models" / "tiny-llama"
NIGHTS = ("8:20", "26:27")  # commits; 11 and 27 are slower, 19 is wrong
SCHEMES = ("flexq-w6ax", "w8a16", "w4a4")
RECORDS = (
    *("h200/paper-fig10-others.parquet", "h200/paper-fig10-flexq.parquet"),
    *("h200/paper-fig10-systems.parquet", "h100/paper-fig10-llama-7b.parquet"),
    *("h200/accuracy-checkpoints-smollm2.jsonl.gz", "h200/decode-checkpoints-smollm2.jsonl.gz"),
    *(
        "h200/five-shapes.parquet",
        "h200/decode-llama-13b-batches.jsonl.gz",
        "h200/serving-llama-7b.jsonl.gz",
    ),
)
MAX_BYTES = 3_000_000


class Service:
    """Commands of the service on one database."""

    def __init__(self, db: Path) -> None:
        self.environment = {**os.environ, "FLEXQ_BENCH_DB": str(db)}

    def __call__(self, *words: str | Path, may_fail: bool = False) -> None:
        """Run a command. may_fail: exit code 1 is a finding."""
        command = [sys.executable, "-m", "flexq_bench", *map(str, words)]
        sys.stdout.write(f"flexq-bench {' '.join(map(str, words))}\n")
        sys.stdout.flush()
        done = subprocess.run(command, env=self.environment, stdout=subprocess.DEVNULL)
        if done.returncode not in ((0, 1, 3) if may_fail else (0,)):
            raise SystemExit(f"exit code {done.returncode}")


def measure_nights(folder: Path, db: Path) -> None:
    """Measure the nights, gates and a bisection of a repository with seeded changes."""
    repository = folder / "repo"
    if not repository.exists():
        make = (BYO / "make_repository.py", repository, "--kernels", "torch")
        run((*make, "--percent", "40", "20"))
    for numbers in NIGHTS:
        run((BYO / "judge_history.py", repository, "--db", db, "--nights", numbers), check=False)
    for commit in ("slower", "slower~3"):
        gate = ("gate", "perf", "--project", repository, "--base", f"{commit}~1", "--head", commit)
        Service(db)(*gate, may_fail=True)


def measure_checkpoints(folder: Path, db: Path) -> None:
    """Quantize, evaluate, judge and decode the tiny LLaMA under each scheme, and FP16."""
    service, text = Service(db), TINY / "heldout.txt"
    for scheme in SCHEMES:
        out = folder / "models" / scheme
        if not out.exists():
            service("quantize", TINY, "--scheme", scheme, "--out", out)
        of = ("--model", TINY, "--checkpoint", out, "--data", text)
        service("accuracy", *of)
        service("gate", "accuracy", *of, "--policy", TINY / "policy.toml", may_fail=True)
        service("decode", out, "--new", "32", "--processes", "1")
    service("decode", TINY, "--scheme", "fp16", "--new", "32", "--processes", "1")


def run(words: Sequence[object], *, check: bool = True) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=check)


@contextmanager
def connected(db: Path) -> Iterator[sqlite3.Connection]:
    """Open a database; at the end changes are committed and it is closed."""
    with closing(sqlite3.connect(db)) as connection, connection:
        yield connection


def date_nights(db: Path) -> None:
    """Date the runs of each night, and its results and verdicts, a day after the night before."""
    with connected(db) as connection:
        nights = connection.execute(
            "SELECT night.name, run.id, run.created_at FROM night JOIN run ON night.run_id = run.id"
            " ORDER BY night.name"
        ).fetchall()
        times = [datetime.fromisoformat(at) for _, _, at in nights]
        last = len(nights) - 1
        shifts = [timedelta(days=i - last) for i in range(len(nights))]
        for table, column in dated_columns(connection):
            rows = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
            for rowid, value in rows:
                if value is None:
                    continue
                at = datetime.fromisoformat(value)
                before = [shift for time, shift in zip(times, shifts, strict=True) if time <= at]
                if not before or at > times[-1]:
                    continue  # not of a night, or of the last one
                moved = (at + before[-1]).isoformat(sep=" ", timespec="microseconds")
                update = f"UPDATE {table} SET {column} = ? WHERE rowid = ?"
                connection.execute(update, (moved, rowid))


def dated_columns(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return the tables and columns that hold times of what was measured or decided."""
    tables = ("run", "measurement", "decision", "alert", "alert_event", "night", "change_point")
    found = []
    for table in tables:
        for row in connection.execute(f"PRAGMA table_info({table})"):
            if row[2].upper().startswith(("DATETIME", "TIMESTAMP")):
                found.append((table, row[1]))
    return found


def add_records(db: Path) -> None:
    """Import the example records, without their samples."""
    with connected(db) as connection:
        (before,) = connection.execute("SELECT coalesce(max(id), 0) FROM measurement").fetchone()
    Service(db)("db", "import", *(ROOT / "examples" / name for name in RECORDS))
    with connected(db) as connection:
        connection.execute("DELETE FROM sample WHERE measurement_id > ?", (before,))


def pack(db: Path, out: Path) -> None:
    """Compress the database; fails if it is too large for a wheel."""
    folder = f"{db.parent}/"
    with connected(db) as connection:
        # Of this checkout and machine: branches, processes, folders.
        connection.execute("DELETE FROM branch WHERE project = '' AND NOT is_main")
        connection.execute("UPDATE branch SET name = 'main' WHERE project = ''")
        owner = "owner_host = NULL, owner_pid = NULL, owner_start = NULL, options = NULL"
        connection.execute(f"UPDATE run SET {owner}")
        stored = connection.execute("SELECT weights FROM decode_result").fetchall()
        sources = {words.partition("examples/models")[0] for (words,) in stored}
        for prefix in {folder, *(source for source in sources if source.startswith("/"))}:
            connection.execute(
                "UPDATE decode_result SET weights = replace(weights, ?, ''), "
                "case_key = replace(case_key, ?, '')",
                (prefix, prefix),
            )
        connection.execute("DELETE FROM delivery")
        connection.execute("DELETE FROM event")
    with closing(sqlite3.connect(db, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("VACUUM")
    out.write_bytes(lzma.compress(db.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    size = out.stat().st_size
    sys.stdout.write(f"{json.dumps({'file': str(out), 'bytes': size})}\n")
    if size > MAX_BYTES:
        raise SystemExit(f"{size} bytes, more than {MAX_BYTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pack-only", action="store_true", help="Of what FOLDER has.")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    measured = options.folder / "demo.sqlite"
    if not options.pack_only:
        measure_nights(options.folder, measured)
        measure_checkpoints(options.folder, measured)
    db = options.folder / "packed.sqlite"
    db.unlink(missing_ok=True)
    with connected(measured) as source, connected(db) as target:
        source.backup(target)
    date_nights(db)
    add_records(db)
    pack(db, options.out)


if __name__ == "__main__":
    main()
