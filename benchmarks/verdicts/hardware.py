"""Noise by level, false alerts and power of the confirmation rule on a real GPU.

Two parts; measurements from before an interruption are kept, and `noise` adds to them:
    python benchmarks/verdicts/hardware.py noise --out FOLDER     a commit against itself
    python benchmarks/verdicts/hardware.py power --out FOLDER     against slow-downs of known size
    python benchmarks/verdicts/hardware.py report --out FOLDER    tables and plot again, no GPU
Writes noise.json.gz, power.json.gz (blocks, microseconds) and noise.svg, and prints the tables that
docs/statistics.md quotes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hierarchy import noise_plot, sigmas

from flexq_bench.kernels.cuda.probes import SPIN_CYCLES
from flexq_bench.measure.ab import Block, InterleaveRules, compare_commits
from flexq_bench.measure.ab.commits import compare_trees
from flexq_bench.measure.ab.experiment import Side
from flexq_bench.verdicts import (
    CaseComparison,
    Comparison,
    Confirmation,
    Verdict,
    confirm,
    confirm_together,
)
from flexq_bench.workloads.case import Case

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("workloads", "kernels", "flexq_bench", "db", "ci", "dashboard")
CASES = tuple(
    Case.from_key(key)
    for key in (
        "flexq-imma-w6a6 gemm cold m4n4096k4096",
        "flexq-imma-w6a8 gemm cold m4n4096k4096",
        "flexq-w6a6 gemm cold m4n4096k4096",
        "abq-w6a6 gemm cold m4n4096k4096",
        "cublaslt-w8a8 gemm cold m4n4096k4096",
        "cublas-fp16 gemm cold m4n28672k8192",
        # At these sizes an H200 without gaps runs at its power limit.
        "flexq gemm cold m256n4096k14336",
        "cublas-fp16 gemm cold m256n4096k14336",
        "cublaslt-w8a8 gemm cold m1024n4096k14336",
        "cublas-fp16 gemm cold m1024n4096k14336",
    )
)
SPIN = Case.from_key("spin gemm cold m1n1k1")
STEPS = (0.005, 0.01, 0.02, 0.05)
MIN_PAIRS = 200
MAX_ERROR = 0.003  # relative to the true size
# 200 pairs of blocks a case, and every level has something to compare.
NOISE = InterleaveRules(processes=8, placements=5, blocks=5, looks=1)
POWER = InterleaveRules()
Plain = dict[str, Any]
NOISE_FILE, POWER_FILE = "noise.json.gz", "power.json.gz"


class TimeOverError(Exception):
    """The seconds that a part was given are over."""


def measure_noise(out: Path, device: str, rules: InterleaveRules, seconds: float) -> None:
    """Compare every case of CASES with itself, until the time is over.

    What NOISE_FILE holds already stays, and further pairs of processes are added to it.
    """
    path = out / NOISE_FILE
    rows = _read(path) if path.exists() else []
    first = 1 + max((row["process"] for row in rows), default=-1)
    stop_at = time.monotonic() + seconds
    began: set[tuple[str, int]] = set()

    def keep(case: Case, block: Block) -> None:
        place = (case.key, block.process)
        if place not in began:  # the case before this one is complete
            _write(path, rows)
            began.add(place)
            sys.stdout.write(f"pair of processes {block.process + 1}: {case.key}\n")
            sys.stdout.flush()
        if time.monotonic() > stop_at:
            raise TimeOverError
        rows.append(_row(case, block, first + block.process))

    same = Side("same", ROOT)
    try:
        for comparison in compare_trees(
            same, same, CASES, device=device, rules=rules, on_block=keep
        ):
            if comparison.detail:
                sys.stdout.write(f"{comparison.case.key}: {comparison.detail}\n")
    except TimeOverError:
        sys.stdout.write(f"the {seconds:g} s are over: start it again for more pairs\n")
    _write(path, rows)


def measure_power(out: Path, device: str) -> None:
    """The spin kernel made longer by each of STEPS, found by compare_commits."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            cycles = round(SPIN_CYCLES * (1 + step))
            with _two_versions(Path(folder) / f"{cycles}", cycles) as (base, head, repository):
                for comparison in _compare(base, head, repository, device):
                    rows.append({"true": cycles / SPIN_CYCLES - 1, **_judged(comparison)})
            _write(out / POWER_FILE, rows)
            sys.stdout.write(f"{step:.1%}: {rows[-1]['verdict']} {rows[-1]['reason']}\n")
            sys.stdout.flush()


def report_noise(out: Path) -> None:
    """The table of sigmas and alerts, and the plot."""
    rows = _read(out / NOISE_FILE)
    write = sys.stdout.write
    write("\n| kernel | M x N x K | pairs of blocks | sample | block | placement | process |")
    write(" ratio: block | placement | process | modes | alerts |\n")
    write("| --- | --- |" + " ---: |" * 10 + "\n")
    confirmations: list[Confirmation] = []
    lines: list[tuple[list[str], int]] = []
    plotted = []
    for case in CASES:
        mine = [row for row in rows if row["case"] == case.key]
        if not mine:
            continue
        times, ratios = sigmas(mine)
        comparisons = _comparisons(mine)
        confirmations.extend(map(confirm, comparisons))
        g = case.gemm
        cells = [case.label, f"{g.m}x{g.n}x{g.k}", str(len(mine))]
        cells += [f"{100 * sigma:.2f} %" for sigma in (*reversed(times), *reversed(ratios))]
        cells.append(_modes(mine))
        lines.append((cells, len(comparisons)))
        plotted.append((f"{case.label} {g.m}x{g.n}x{g.k}", mine))
    night = list(confirm_together(confirmations))
    for cells, count in lines:
        mine_night, night = night[:count], night[count:]
        alerts = sum(
            confirmation.verdict in (Verdict.SLOWER, Verdict.FASTER) for confirmation in mine_night
        )
        write(f"| {' | '.join(cells)} | {alerts} of {count} |\n")
    short = [cells[0] for cells, _ in lines if int(cells[2]) < MIN_PAIRS]
    if short:
        write(f"fewer than {MIN_PAIRS} pairs of blocks: {', '.join(short)}\n")
    (out / "noise.svg").write_text(noise_plot(plotted))


def report_power(out: Path) -> None:
    """Measured against true."""
    rows = _read(out / POWER_FILE)
    write = sys.stdout.write
    write("\n| true | measured | 99 % bounds | error | within ± 0.3 % | above zero ")
    write("| verdict | blocks |\n")
    write("| ---: | ---: | ---: | ---: | --- | --- | --- | ---: |\n")
    for row in rows:
        if row["log_ratio"] is None:
            write(f"| {row['true']:+.2%} | | | | no | no | {row['verdict']}: {row['reason']} | |\n")
            continue
        measured, low, high = (float(np.expm1(row[k])) for k in ("log_ratio", "low", "high"))
        off = measured - row["true"]
        write(f"| {row['true']:+.2%} | {measured:+.3%} | {low:+.3%} … {high:+.3%} | {off:+.3%} ")
        sized, seen = abs(off) <= MAX_ERROR, low > 0
        write(f"| {_yes(sized)} | {_yes(seen)} | {row['verdict']} | {row['blocks']} |\n")


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _read(path: Path) -> list[Plain]:
    rows: list[Plain] = json.loads(gzip.decompress(path.read_bytes()))
    return rows


def _write(path: Path, rows: Sequence[Plain]) -> None:
    path.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


def _row(case: Case, block: Block, process: int) -> Plain:
    return {
        "case": case.key,
        "process": process,
        "placement": block.placement,
        "base_us": block.base_us,
        "head_us": block.head_us,
        "base_mhz": block.base_mhz,
        "head_mhz": block.head_mhz,
        # The spread of samples in each turn; the samples themselves would be a hundred times more.
        "turns": [
            [float(np.mean(np.log(t.samples_us))), float(np.std(np.log(t.samples_us), ddof=1))]
            for t in (*block.base, *block.head)
            if len(t.samples_us) > 1
        ],
    }


def _comparisons(rows: Sequence[Plain]) -> list[Comparison]:
    """Return the comparisons of nights: one placement of each pair of processes, the default."""
    made = []
    for placement in sorted({row["placement"] for row in rows}):
        part = [row for row in rows if row["placement"] == placement]
        has_clocks = all(row["base_mhz"] and row["head_mhz"] for row in part)
        made.append(
            Comparison(
                [row["base_us"] for row in part],
                [row["head_us"] for row in part],
                [row["process"] for row in part],
                [row["base_mhz"] for row in part] if has_clocks else None,
                [row["head_mhz"] for row in part] if has_clocks else None,
            )
        )
    return made


def _modes(rows: Sequence[Plain]) -> str:
    """The fastest and the slowest process, where they are more than 3 % apart."""
    medians = [
        float(np.median([row[side] for row in rows if row["process"] == process]))
        for process in {row["process"] for row in rows}
        for side in ("base_us", "head_us")
    ]
    low, high = min(medians), max(medians)
    return f"{low:.1f} and {high:.1f} µs" if high > 1.03 * low else "one"


def _judged(compared: CaseComparison) -> Plain:
    confirmed = compared.confirmation
    judged = np.isfinite(confirmed.log_ratio)
    return {
        "verdict": str(confirmed.verdict),
        "reason": compared.detail or confirmed.reason,
        "log_ratio": confirmed.log_ratio if judged else None,
        "low": confirmed.low if judged else None,
        "high": confirmed.high if judged else None,
        "blocks": confirmed.blocks,
        "base_us": list(compared.comparison.base_us),  # type: ignore[arg-type]
        "head_us": list(compared.comparison.head_us),  # type: ignore[arg-type]
        "pair": list(compared.comparison.placement),  # type: ignore[arg-type]
    }


@contextmanager
def _two_versions(folder: Path, cycles: int) -> Iterator[tuple[str, str, Path]]:
    """A repository whose second commit spins longer; without git two folders."""
    first, second = folder / "base", folder / "head"
    _copy(first)
    if shutil.which("git") is None:
        _copy(second)
        _lengthen(second, cycles)
        yield "base", "head", folder
        return
    _commit(first, "init", "--quiet")
    _commit(first, "add", ".")
    _commit(first, "commit", "--quiet", "--message", "as it is")
    base = _commit(first, "rev-parse", "HEAD")
    _lengthen(first, cycles)
    _commit(first, "commit", "--quiet", "--all", "--allow-empty", "--message", "spin longer")
    yield base, _commit(first, "rev-parse", "HEAD"), first


def _compare(base: str, head: str, repository: Path, device: str) -> Iterator[CaseComparison]:
    if (repository / ".git").exists():
        return compare_commits(repository, base, head, [SPIN], device=device, rules=POWER)
    sides = [Side(name, repository / name) for name in (base, head)]
    return compare_trees(sides[0], sides[1], [SPIN], device=device, rules=POWER)


def _copy(folder: Path) -> None:
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, folder / room, ignore=ignored, symlinks=True)


def _lengthen(folder: Path, cycles: int) -> None:
    source = folder / "kernels" / "cuda" / "probes.py"
    text = source.read_text()
    before = f"SPIN_CYCLES = {SPIN_CYCLES:_}"
    if before not in text:
        raise SystemExit(f"{source} has no line {before!r} to edit")
    source.write_text(text.replace(before, f"SPIN_CYCLES = {cycles:_}"))


def _commit(repository: Path, *arguments: str) -> str:
    who = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    done = subprocess.run(
        ["git", "-C", str(repository), *who, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("noise", "power", "report"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=270.0, help="of the part `noise`, at most")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "noise":
        measure_noise(options.out, options.device, NOISE, options.seconds)
    if options.part == "power":
        measure_power(options.out, options.device)
    if options.part in ("noise", "report") and (options.out / NOISE_FILE).exists():
        report_noise(options.out)
    if options.part in ("power", "report") and (options.out / POWER_FILE).exists():
        report_power(options.out)


if __name__ == "__main__":
    main()
