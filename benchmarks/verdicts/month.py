"""A month of nights on two kinds of GPU: which series are compared, and when steps are confirmed.

    python benchmarks/verdicts/month.py [--nights 30] [--series 200] [--kinds 2] [--seed 0]

Every kind has its own noise and steps. Nights are stored in a temporary database; candidates, plan,
verdicts and alerts are the product's, only times are drawn. A commit a night; 7 commits of each
kind change one to ten series of a family for good by 3 to 10 % (two of them for the better), one
for six nights. A step is seeded if it is at least 5 sigmas of its series' nights.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from tempfile import TemporaryDirectory

import numpy as np
from noise import SIGMA, Floats, nightly
from simulate import candidate_of, decide

from flexq_bench.ci.candidates import Suspect, planned_comparisons, suspects_of
from flexq_bench.ci.report_data import MAX_CANDIDATES
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.db.store import add_records, begin_run
from flexq_bench.measure import Measured
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.record import build_record
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict
from flexq_bench.verdicts.nightly import record_night
from flexq_bench.workloads.case import Case

KERNELS = ("flexq-w6a6", "flexq-imma-w6a8", "abq-w6a6", "cublas-fp16", "cublaslt-w8a8")
# kinds of noise, and their shares among the series
NOISE = {
    "Gaussian": 0.6,
    "Student t(3)": 0.15,
    "AR(1) 0.6": 0.1,
    "3 % spikes": 0.1,
    "sticky bimodal": 0.05,
}
SIGMAS = (0.003, 0.005, 0.01)  # of nights; processes have half of it
STEPS = (0.05, 0.1, -0.06, 0.04, 0.08, 0.03, -0.1, 0.07)  # the last returns after 6 nights
FIRST_STEP = 8
CLEAR_SIGMAS = 5.0
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
RULES = InterleaveRules()
PARTS = ("results stored", "comparisons chosen", "judged")


@dataclass
class Kind:
    """The series of one kind of GPU: logs [series, nights], and the night of each one's step."""

    machine: Machine
    cases: list[Case]
    logs: Floats
    levels: Floats
    noise: list[str]
    sigmas: Floats
    first: dict[int, int] = field(default_factory=dict)
    confirmed: dict[int, int] = field(default_factory=dict)


def kind_of(number: int, series: int, nights: int, seed: int = 0) -> Kind:
    rng = np.random.default_rng(zlib.crc32(f"month {number + 1000 * seed}".encode()))
    per_kernel = -(-series // len(KERNELS))
    cases = [
        Case.from_key(f"{kernel} gemm cold m{2 ** (at % 8)}n{1024 * (1 + at // 8)}k4096")
        for kernel in KERNELS
        for at in range(per_kernel)
    ][:series]
    noise = [str(one) for one in rng.choice(list(NOISE), series, p=list(NOISE.values()))]
    sigmas = rng.choice(SIGMAS, series)
    drawn = [nightly(one, rng, 1, nights)[0] / SIGMA for one in noise]
    levels = np.zeros((series, nights))
    kind = Kind(
        Machine("cuda", DeviceInfo(f"GPU-{number}", f"GPU {number}", "cuda")),
        *(cases, sigmas[:, None] * np.array(drawn), levels, noise, sigmas),
    )
    places = np.linspace(FIRST_STEP, nights - 7, len(STEPS)) if nights > 16 else np.zeros(0)
    free = set(range(series))
    for place, (step, night) in enumerate(zip(STEPS, places.astype(int).tolist(), strict=False)):
        kernel = KERNELS[place % len(KERNELS)]
        able = [one for one in sorted(free) if cases[one].kernel == kernel]
        chosen = rng.choice(able, min(int(rng.integers(1, 11)), len(able)), replace=False)
        stop = night + 6 if place == len(STEPS) - 1 else nights
        for one in chosen.tolist():
            free.discard(one)
            kind.levels[one, night:stop] = np.log1p(step)
            if abs(np.log1p(step)) >= CLEAR_SIGMAS * sigmas[one]:
                kind.first[one] = night
    return kind


def commit_of(night: int) -> CommitInfo:
    sha, parent = f"{night + 1:040x}", f"{night:040x}" if night else None
    at = (FIRST + timedelta(days=night)).isoformat()
    return CommitInfo(
        sha, parent, None, dirty=False, committed_at=at, parents=(parent,) if parent else ()
    )


def measure(database: Database, kind: Kind, night: int) -> str:
    """Store the results of a night; return its run."""
    at = (FIRST + timedelta(days=night)).isoformat()
    plan = tuple(case.key for case in kind.cases)
    run = replace(new_run("nightly", "nightly", plan), created_at=at)
    times = 20 * np.exp(kind.logs[:, night] + kind.levels[:, night])
    records = []
    for case, us in zip(kind.cases, times, strict=True):
        identity = kind.machine.series_of(case)
        names = ("protocol_version", "input_distribution", "kernel_version")
        bits = ("weight_bits", "act_bits", "group")
        own = {name: identity[name] for name in (*names, *bits)}
        found = Measured("ok", "", 0, median_us=float(us), **own)
        record = build_record(case, found, run, commit_of(night), kind.machine.device, {})
        records.append(replace(record, created_at=at))
    with database.session() as session:
        begin_run(session, run, commit_of(night))
        add_records(session, records)
    return run.uuid


def compare(
    kind: Kind, night: int, planned: list[tuple[str, str, list[Case]]]
) -> list[CaseComparison]:
    """The planned comparisons; processes differ by half of a night's sigma."""
    places = {case: at for at, case in enumerate(kind.cases)}
    drawn, asked = [], []
    for base, head, cases in planned:
        before, after = int(base, 16) - 1, int(head, 16) - 1
        for case in cases:
            at = places[replace(case, model="", layer="")]
            rng = np.random.default_rng(zlib.crc32(f"{kind.machine} {night} {at} {base}".encode()))
            shift = float(kind.levels[at, after] - kind.levels[at, before])
            sigma = float(kind.sigmas[at]) / 2
            drawn.append(candidate_of(kind.noise[at], rng, shift, sigma, RULES))
            asked.append((case, base, head))
    decide(drawn, RULES)
    compared = []
    for candidate, (case, base, head) in zip(drawn, asked, strict=True):
        judged = candidate.judge()
        blocks = judged.comparison
        kept = Comparison(
            *(np.asarray(blocks.base_us).tolist(), np.asarray(blocks.head_us).tolist()),
            np.asarray(blocks.placement).tolist(),
        )
        compared.append(CaseComparison(case, base, head, kept, judged.confirmation))
    return compared


@dataclass
class Night:
    """Counts of a night of a kind. false: candidates that have no change."""

    candidates: int
    false: int
    compared: int
    known: int
    alerts: int
    waiting: dict[str, int]
    seconds: dict[str, float]  # of CPU, by part of the night, without drawing


def carry_out(
    database: Database, kind: Kind, night: int, budget: int, waiting: dict[str, int]
) -> Night:
    """Store results, choose comparisons, draw them and judge them."""
    times = [time.process_time()]
    run = measure(database, kind, night)
    times.append(time.process_time())
    commit = commit_of(night)
    places = {case: at for at, case in enumerate(kind.cases)}

    def place(suspect: Suspect) -> int:
        return places[replace(suspect.case, model="", layer="")]

    with database.session() as session:
        suspects = suspects_of(session, run, commit, waiting)
        planned = planned_comparisons(
            session, suspects, commit, budget=budget, canaries=2, seed=f"{night}"
        )
    times.append(time.process_time())
    compared = compare(kind, night, planned)
    drawn = time.process_time()
    shas = {sha for one in compared for sha in (one.base, one.head)} | {commit.sha}
    with database.session() as session:
        stored = record_night(
            session, compared, kind.machine,
            {sha: commit_of(int(sha, 16) - 1) for sha in shas},
            alerting=True, at=FIRST + timedelta(days=night),
        )  # fmt: skip
    times.append(time.process_time() - drawn + times[-1])
    seconds = dict(zip(PARTS, np.diff(times).tolist(), strict=True))
    known = 0
    for judged in stored.judged:
        at = places[replace(judged.case, model="", layer="")]
        changed = judged.confirmation.verdict in (Verdict.SLOWER, Verdict.FASTER)
        if changed and night >= kind.first.get(at, night + 1):
            known += at in kind.confirmed and kind.levels[at, night] == kind.levels[at, -1]
            kind.confirmed.setdefault(at, night)
    every = [place(one) for one in suspects.outliers]
    unchanged = {at for at in range(len(kind.cases)) if not kind.levels[at].any()}
    left = {one.case.key: waiting.get(one.case.key, 0) + 1 for one in suspects.outliers[budget:]}
    return Night(
        suspects.candidates, sum(at in unchanged for at in every), len(compared), known,
        len(stored.opened), left, seconds,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=30)
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--kinds", type=int, default=2)
    parser.add_argument("--budget", type=int, default=MAX_CANDIDATES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out = sys.stdout.write
    kinds = [
        kind_of(number, options.series, options.nights, options.seed)
        for number in range(options.kinds)
    ]
    rows: dict[int, list[Night]] = defaultdict(list)
    out("| night | candidates | of them unchanged | compared | known before | alerts | seconds |\n")
    out("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n")
    with TemporaryDirectory() as folder, open_database(f"{folder}/month.sqlite") as database:
        for night in range(options.nights):
            tonight = []
            for number, kind in enumerate(kinds):
                waiting = rows[number][-1].waiting if rows[number] else {}
                one = carry_out(database, kind, night, options.budget, waiting)
                rows[number].append(one)
                tonight.append(one)
            sums = [sum(getattr(one, name) for one in tonight)
                    for name in ("candidates", "false", "compared", "known", "alerts")]  # fmt: skip
            seconds = sum(sum(one.seconds.values()) for one in tonight)
            out(f"| {night + 1} | " + " | ".join(map(str, sums)) + f" | {seconds:.1f} |\n")
            sys.stdout.flush()
        with database.session() as session:
            stored = queries.alerts(session)
    quiet = sum(options.series - int(kind.levels.any(axis=1).sum()) for kind in kinds)
    for first, last in ((6, 7), (11, 20), (21, options.nights)):
        nights = [one.false for row in rows.values() for one in row[first - 1 : last]]
        share = sum(nights) / max(quiet * len(nights) / len(kinds), 1)
        out(f"\nnights {first} to {last}: {share:.1%} of the unchanged series are candidates")
    steps = [(kind, at, night) for kind in kinds for at, night in kind.first.items()]
    soon = [kind.confirmed.get(at, 10**6) < night + 2 for kind, at, night in steps]
    found = {(step[0].machine, step[2]) for step, hit in zip(steps, soon, strict=True) if hit}
    commits = {(kind.machine, night) for kind, _, night in steps}
    out(f"\nsteps confirmed within two nights: {sum(soon)} of {len(steps)} series, ")
    out(f"{len(found)} of {len(commits)} commits; {len(stored)} alerts\n")
    if options.nights > 10:
        spans = [[row[night] for row in rows.values()] for night in range(options.nights)]
        out("CPU seconds of nights 4 to 6 (median), and the last three over them:\n")
        for parts in (PARTS, *((part,) for part in PARTS)):
            times = [sum(one.seconds[part] for one in span for part in parts) for span in spans]
            early, late = float(np.median(times[3:6])), float(np.median(times[-3:]))
            out(f"{', '.join(parts)}: {early:.3f} s, {late / early:.2f}\n")


if __name__ == "__main__":
    main()
