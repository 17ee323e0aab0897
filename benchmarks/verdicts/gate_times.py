"""Wall time and exit codes of `gate perf` in a repository of its own, by what head changed.

    python benchmarks/verdicts/gate_times.py                     # one case of torch, on a CPU
    python benchmarks/verdicts/gate_times.py --kernel triton --m 1,2,4,8,16,32,64,128
    python benchmarks/verdicts/gate_times.py --kernel triton --m 1:99 --heads unchanged,one
    python benchmarks/verdicts/gate_times.py --times 200 --heads unchanged    # A/A
    python benchmarks/verdicts/gate_times.py --phases           # where each gate spent its time
    python benchmarks/verdicts/gate_times.py --heads unchanged --processes 24 --blocks FOLDER
    python benchmarks/verdicts/looks.py --stored FOLDER         # gates of these pairs, drawn anew

The sample repository's W6A8 kernel has a case for each value of M. Heads: `comment`, `unchanged`
(an unused constant), `slower-P` by P percent of the work (zeros at the ends of rows), `wrong`,
`queued` (slower, with work of its own on the GPU during base's turns), and `one`: a W4A16 kernel
with a single case is slower by 3 %, the other cases are not. --blocks: adds the blocks of unchanged
heads to FOLDER/noise.json.gz. Prints a line for each gate, then a row for each head. Exit code 1:
an unchanged head was reported as a regression.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from flexq_bench.db.engine import open_database
from flexq_bench.db.tables import DecisionEvidence
from flexq_bench.exit_codes import ExitCode
from flexq_bench.repository.provenance import ROOT

# 20 and 100 groups of K, so that the percentages are whole groups.
SHAPES = {"torch": "1024x2560", "triton": "1024x12800"}
PROGRAM = ("-m", "flexq_bench")
PHASES = (str(ROOT / "benchmarks/verdicts/gate_phases.py"),)
HEADS = "unchanged,slower-15,slower-3,wrong"
PADDING, SIGN = "PADDING_PERCENT = 0 ", "SIGN = 1\n"
QUEUED = """
import torch
from flexq_bench.measure.ab.operations import WorkerOperations

timed_turn, cycles = WorkerOperations.turn, 60_000_000


def turn(*given, **named):
    reply = timed_turn(*given, **named)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(cycles)
    return reply


WorkerOperations.turn = turn
"""
ONE_CASE = '\n[[group]]\nkernels = ["acme.{kernel}-w4a16"]\nm = "16"\nshapes = ["{shape}"]\n'


@dataclass
class Outcomes:
    """Of the gates of one head. reported: labels of cases that are not a pass."""

    codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    reported: Counter[str] = field(default_factory=Counter)


def git(folder: Path, *arguments: str) -> None:
    person = ("-c", "user.name=acme", "-c", "user.email=acme@example.com")
    subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True)


def changed(source: str, head: str, kernel: str) -> str:
    """The kernels of a head."""
    if head == "comment":
        return source + "# Nothing changed.\n"
    if head == "unchanged":
        return source + "UNUSED = 0\n"
    if head == "wrong":
        return source.replace(SIGN, "SIGN = -1\n")
    if head == "queued":
        return changed(source, "slower-15", kernel) + QUEUED
    if head == "one":
        label = f'"{kernel}-w4a16"'
        before, after = source.split(label)
        decorator = before.rindex("@linear_kernel")
        copies = ""
        for name in ("prepared", "padded", "launch"):
            if f"def {name}(" in source:
                copy = source[source.index(f"def {name}(") :].split("\n\n\n")[0]
                copies += copy.replace(f"{name}(", f"{name}_more(").replace("PADDING_PERCENT", "3")
                copies += "\n\n\n"
                after = re.sub(rf"\b{name}\b", f"{name}_more", after, count=1)
        return f"{before[:decorator]}{copies}{before[decorator:]}{label}{after}"
    return source.replace(PADDING, f"PADDING_PERCENT = {head.removeprefix('slower-')} ")


def make_repository(folder: Path, given: argparse.Namespace) -> None:
    """A project with a branch `base` and one for each head."""
    maker, shape = ROOT / "examples/byo/make_repository.py", given.shape or SHAPES[given.kernel]
    subprocess.run(
        [sys.executable, str(maker), str(folder), "--kernels", given.kernel, "--shape", shape],
        check=True,
    )
    git(folder, "checkout", "--quiet", "-B", "base", "slower~1")
    suite, policy = folder / "bench" / "suite.toml", folder / "bench" / "policy.toml"
    text = suite.read_text().replace('m = "16"', f'm = "{given.m}"')
    text = text.replace("acme.*", f"acme.{given.kernel}-w6a8")
    if "one" in given.heads.split(","):
        text += ONE_CASE.format(kernel=given.kernel, shape=shape)
    suite.write_text(text)
    limit = f"slower_percent = {given.limit:g}"
    policy.write_text(re.sub("slower_percent = .*", limit, policy.read_text()))
    git(folder, "commit", "--quiet", "--all", "--message", "base")
    path = folder / "kernels" / f"{given.kernel}_kernels.py"
    source = path.read_text()
    for head in filter(None, given.heads.split(",")):
        git(folder, "checkout", "--quiet", "-B", head, "base")
        path.write_text(changed(source, head, given.kernel))
        git(folder, "commit", "--quiet", "--all", "--message", head)


def timed(
    *arguments: str, program: Sequence[str] = PROGRAM
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command of this program; return how it ended, and seconds."""
    began = time.monotonic()
    command = [sys.executable, *program, *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return ran, time.monotonic() - began


def gate(
    folder: Path, head: str, seed: int, more: list[str], *, phases: bool = False
) -> tuple[int, float, dict[str, Any]]:
    """Exit code, seconds, and the JSON report of a gate. phases: print where it spent its time."""
    report = folder.parent / "report.json"
    report.unlink(missing_ok=True)
    ran, took = timed(
        *("gate", "perf", "--base", "base", "--head", head, "--project", str(folder)),
        *("--seed", str(seed), "--db", str(folder.parent / "gates.sqlite")),
        *("--json", str(report), *more),
        program=PHASES if phases else PROGRAM,
    )
    if phases:
        sys.stdout.write(ran.stderr[max(0, ran.stderr.rfind(" s in all") - 8) :])
    if not report.exists():
        sys.stdout.write(ran.stderr[-2000:])
        return ran.returncode, took, {"headline": "no report", "cases": []}
    return ran.returncode, took, json.loads(report.read_text())


def keep_blocks(database: Path, folder: Path) -> None:
    """Write the blocks of all gates of a database, as `hardware.py noise` does."""
    rows = []
    stored = select(DecisionEvidence.data).order_by(DecisionEvidence.decision_id)
    with open_database(str(database), read_only=True) as opened, opened.session() as session:
        for number, data in enumerate(session.scalars(stored)):
            evidence = json.loads(zlib.decompress(data))
            blocks = (evidence["comparison"][name] for name in ("base_us", "head_us", "placement"))
            cpu_wait = evidence["comparison"]["cpu_wait"]
            for base, head, pair in zip(*blocks, strict=True):
                place = {"case": evidence["case"], "process": 1000 * number + pair, "placement": 0}
                rows.append({**place, "base_us": base, "head_us": head, "cpu_wait": cpu_wait})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "noise.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


def line(case: dict[str, Any]) -> str:
    """Facts about a case, except where it is the same."""
    if case["verdict"] == "same":
        return ""
    if case["change_percent"] is None:
        return f"  {case['case']}: {case['verdict']}: {case['reason']}\n"
    low, change, high = (case[f"{name}_percent"] for name in ("low", "change", "high"))
    bounds = f"{change:+.2f} % ({low:+.2f} … {high:+.2f})"
    return f"  {case['case']}: {case['verdict']} {bounds} after {case['pairs']} pairs\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="torch", choices=list(SHAPES))
    parser.add_argument("--m", default="16", help="of the cases, as in a suite")
    parser.add_argument("--shape", help="N x K")
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--limit", type=float, default=2.0, help="accepted slow-down, percent")
    parser.add_argument("--times", type=int, default=1, help="gates of each head")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--blocks", type=Path, metavar="FOLDER")
    given, more = parser.parse_known_args()
    outcomes: dict[str, Outcomes] = {head: Outcomes() for head in given.heads.split(",")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "acme"
        make_repository(folder, given)
        for seed in range(given.times):
            for head, found in outcomes.items():
                code, took, report = gate(folder, head, seed, more, phases=given.phases)
                if given.blocks and head == "unchanged":
                    keep_blocks(folder.parent / "gates.sqlite", given.blocks)
                found.codes[code] += 1
                found.seconds.append(took)
                found.pairs.append(sum(case["pairs"] for case in report["cases"]))
                found.reported.update(
                    case["case"].partition(" ")[0]
                    for case in report["cases"]
                    if case["outcome"] == "regression"
                )
                sys.stdout.write(f"{head}: exit {code}, {took:.1f} s, {report['headline']}\n")
                sys.stdout.write("".join(map(line, report["cases"])))
                sys.stdout.flush()
    sys.stdout.write("\n| head | exit codes | seconds | pairs of all cases | regressions |\n")
    sys.stdout.write("| --- | --- | ---: | ---: | --- |\n")
    for head, found in outcomes.items():
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(found.codes.items()))
        labels = ", ".join(f"{count} {label}" for label, count in found.reported.items())
        sys.stdout.write(
            f"| {head} | {codes} | {statistics.median(found.seconds):.1f} | "
            f"{statistics.median(found.pairs):.0f} | {labels} |\n"
        )
    unchanged = outcomes.get("unchanged", Outcomes())
    sys.exit(int(unchanged.codes[ExitCode.REGRESSION] > 0))


if __name__ == "__main__":
    main()
