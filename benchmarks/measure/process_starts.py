"""Fresh, forked and sandboxed worker processes: how fast they start, and whether kernels are alike.

    python benchmarks/measure/process_starts.py --processes 60 --seconds 280 --out starts.json \\
        "flexq-imma-w6a6 gemm cold m4n4096k4096" "cublas-fp16 gemm cold m256n4096k14336"

Kinds: `fresh` have a new interpreter; `forked` come from a server; the others from a server in the
first kind of sandbox that works here, or the one that FLEXQ_BENCH_SANDBOX names. Some are started
alone, as those of a comparison after its first pair: printed are the median seconds from the
request to the first reply (device opened), to the first launch and to the first timed sample, with
the configuration and the launches of the process before. Then rounds: some processes of
each kind get ready at the same time, and are measured one after the other in random order; each
round has new servers, and nothing else starts meanwhile (with --after, all start before). Printed,
for each case and for each kind against `forked`: the difference of the mean times of processes,
relative to their round, with 99 % bounds; Kolmogorov-Smirnov and Mann-Whitney tests of equal
distributions; the number of slow processes (Fisher) for a kernel of two speeds; and Kruskal-Wallis
over the servers of forked ones.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy import stats

import flexq_bench
from flexq_bench.measure.ab.blocks import CaseSide
from flexq_bench.measure.ab.worker_command import worker_command
from flexq_bench.measure.launcher import (
    OWN_LIBRARIES,
    FreshProcesses,
    Launcher,
    forking_launcher,
)
from flexq_bench.measure.program import sandbox_of
from flexq_bench.measure.sandbox import available_kind
from flexq_bench.measure.worker_process import WorkerProcess
from flexq_bench.workloads.case import Case

TREE = Path(flexq_bench.__file__).resolve().parents[1]
TIMEOUT_S = 600.0
MIN_GAP = 10.0  # of two speeds: their distance by the scatter about each
FORKED = "forked"  # the kind that the others are compared with
KINDS = ("fresh", FORKED, "sandbox")


@dataclass(frozen=True, slots=True)
class Start:
    """A process that started alone: seconds since the request."""

    kind: str
    reply_s: float
    launch_s: float
    sample_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean time of a process's samples of a case."""

    kind: str
    round: int
    case: str
    time_us: float


@contextmanager
def launchers(kinds: Sequence[str]) -> Iterator[dict[str, Launcher]]:
    """A way to start processes of each of these kinds, with new servers."""
    sandbox = replace(sandbox_of([], None, [TREE]), kind=available_kind())
    made: dict[str, Launcher] = {"fresh": FreshProcesses()} if "fresh" in kinds else {}
    with ExitStack() as stack:
        if FORKED in kinds:
            own = forking_launcher(TREE, libraries=OWN_LIBRARIES)
            made[FORKED] = stack.enter_context(own)
        if "sandbox" in kinds and sandbox.kind != "none":
            inside = forking_launcher(TREE, sandbox.wrap, libraries=OWN_LIBRARIES)
            made[sandbox.kind] = stack.enter_context(inside)
        yield made


def worker_of(kind: str, launcher: Launcher, device: str) -> WorkerProcess:
    command = (*worker_command(TREE), "--device", device, "--seed", "0")
    return WorkerProcess(kind, TREE, command, timeout_s=TIMEOUT_S, launcher=launcher)


def start(kind: str, launcher: Launcher, side: CaseSide, device: str) -> Start:
    """Start a process, and end it after its first samples.

    side: with what the process before chose; the first one checks its result, too.
    """
    begun = time.perf_counter()
    is_first = side.config is None
    with worker_of(kind, launcher, device) as worker:
        worker.request_identity()
        worker.check_identity()
        reply_s = time.perf_counter() - begun
        side.begin_prepare(worker, None, check=is_first)
        side.end_prepare(worker)
        side.begin_place(worker, 0, None, is_warm=not is_first)
        side.end_place(worker)
        launch_s = time.perf_counter() - begun
        side.sample(worker)
        return Start(kind, reply_s, launch_s, time.perf_counter() - begun)


@dataclass(frozen=True, slots=True)
class Round:
    """Processes of all kinds, which import until their first request."""

    number: int
    workers: Sequence[WorkerProcess]
    resources: ExitStack

    def measured(self, cases: Sequence[Case], turns: int) -> Iterator[Measured]:
        """Measure cases in all of them, and end them."""
        draw = random.Random(self.number)
        with self.resources:
            for worker in self.workers:
                worker.request_identity()
            for worker in self.workers:
                worker.check_identity()
            for case in cases:
                sides = [(CaseSide("base", case, config={}), worker) for worker in self.workers]
                draw.shuffle(sides)
                for side, worker in sides:
                    side.begin_prepare(worker, None, check=False)
                for side, worker in sides:
                    side.end_prepare(worker)
                    side.begin_place(worker, 0, None, is_warm=side is not sides[0][0])
                for side, worker in sides:
                    side.end_place(worker)
                for side, worker in sides:
                    times = [side.sample(worker).time_us for _ in range(turns)]
                    valid = [time_us for time_us in times if not math.isnan(time_us)]
                    mean = statistics.fmean(valid) if valid else math.nan
                    yield Measured(worker.name, self.number, case.key, mean)
                for side, worker in sides:
                    worker.ask("release", slot=side.slot)
            for worker in self.workers:
                worker.finish()  # before any is waited for


def kinds_of(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def begin_round(number: int, options: argparse.Namespace) -> Round:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_of(kind, launcher, options.device))
            for kind, launcher in stack.enter_context(launchers(options.kinds)).items()
            for _ in range(options.together)
        ]
        return Round(number, workers, stack.pop_all())


def limit_of_slow(times: Sequence[float]) -> float | None:
    """Time between two speeds; None: there is one speed."""
    ordered = np.sort(times)
    gaps = np.diff(ordered)
    at = int(np.argmax(gaps))
    low, high = ordered[: at + 1], ordered[at + 1 :]
    if min(len(low), len(high)) < 2:
        return None
    scatter = max(float(np.std(low)), float(np.std(high)), 1e-9)
    return float((low[-1] + high[0]) / 2) if gaps[at] > MIN_GAP * scatter else None


def starts_table(starts: Sequence[Start]) -> Iterator[str]:
    """Medians by kind."""
    yield "kind            n  first reply s  first launch s  first sample s"
    for kind in dict.fromkeys(s.kind for s in starts):
        some = [s for s in starts if s.kind == kind]
        rows = zip(*((s.reply_s, s.launch_s, s.sample_s) for s in some), strict=True)
        reply, launch, sample = (statistics.median(values) for values in rows)
        yield f"{kind:12} {len(some):4} {reply:14.2f} {launch:15.2f} {sample:15.2f}"


def report(case: Case, measured: Sequence[Measured]) -> Iterator[str]:
    """Lines of the report on one case."""
    mine = [m for m in measured if m.case == case.key and not math.isnan(m.time_us)]
    level = {
        number: statistics.fmean(m.time_us for m in mine if m.round == number)
        for number in {m.round for m in mine}
    }
    yield f"\n{case.key}"
    times: dict[str, list[float]] = {}
    relative: dict[str, list[float]] = {}
    for m in mine:
        times.setdefault(m.kind, []).append(m.time_us)
        relative.setdefault(m.kind, []).append(math.log(m.time_us / level[m.round]))
    for kind, some in times.items():
        mean, spread = np.mean(some), 100 * np.std(some) / np.mean(some)
        yield f"{kind:12} {len(some):4} processes {mean:9.3f} us, sd {spread:.2f} %"
    yield from comparisons(times, relative)
    by_round = [[m.time_us for m in mine if (m.kind, m.round) == (FORKED, r)] for r in level]
    if len(by_round) > 1 and min(map(len, by_round)) > 1:
        p = stats.kruskal(*by_round).pvalue
        yield f"servers: Kruskal-Wallis p = {p:.3f} over {len(by_round)}"


def comparisons(
    times: Mapping[str, Sequence[float]], relative: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """Lines about each kind against forked processes."""
    forked = times.get(FORKED, ())
    for kind in times.keys() - {FORKED} if len(forked) > 1 else ():
        welch = stats.ttest_ind(relative[kind], relative[FORKED], equal_var=False)
        change = 100 * (np.mean(relative[kind]) - np.mean(relative[FORKED]))
        low, high = (100 * bound for bound in welch.confidence_interval(0.98))
        yield (
            f"{kind} against {FORKED}: {change:+.3f} % ({low:+.3f} to {high:+.3f}), "
            f"Kolmogorov-Smirnov p = {stats.ks_2samp(times[kind], forked).pvalue:.3f}, "
            f"Mann-Whitney p = {stats.mannwhitneyu(times[kind], forked).pvalue:.3f}"
        )
        limit = limit_of_slow([*times[kind], *forked])
        if limit is not None:
            slow = [sum(time_us > limit for time_us in some) for some in (times[kind], forked)]
            table = [[slow[0], len(times[kind]) - slow[0]], [slow[1], len(forked) - slow[1]]]
            p = stats.fisher_exact(table).pvalue
            yield f"  slow: {slow[0]} {kind}, {slow[1]} {FORKED}, Fisher p = {p:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=60, help="of each kind")
    parser.add_argument("--together", type=int, default=4, help="of each kind in a round")
    parser.add_argument("--turns", type=int, default=6, help="of a process and case")
    parser.add_argument("--starts", type=int, default=5, help="alone, of each kind")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no round begins")
    parser.add_argument(
        "--kinds", type=kinds_of, default=KINDS, help="default: fresh,forked,sandbox"
    )
    parser.add_argument(
        "--after",
        type=Path,
        metavar="FILE",
        help="start the processes of all rounds now, and measure when this file exists",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [Case.from_key(key) for key in options.cases]
    out = sys.stdout
    starts: list[Start] = []
    with launchers(options.kinds) as kinds, suppress(KeyboardInterrupt):
        sides = {kind: CaseSide("base", cases[0], learns=True) for kind in kinds}
        for number in range(options.starts + 1 if options.starts else 0):
            for kind, launcher in kinds.items():
                found = start(kind, launcher, sides[kind], options.device)
                # The first of a kind, which waits for imports and compiles, is left out.
                starts += [found] if number else []
    out.write("\n".join(starts_table(starts)) + "\n")
    out.flush()
    measured: list[Measured] = []
    numbers = range(-(-options.processes // options.together))
    rounds = (begin_round(number, options) for number in numbers)
    if options.after:
        begun = list(rounds)
        rounds = (each for each in begun)
        while not options.after.exists():
            time.sleep(0.1)
    until = time.monotonic() + options.seconds
    with suppress(KeyboardInterrupt):  # what was measured until then is reported
        for each in rounds:
            if each.number and time.monotonic() >= until:
                break
            measured += each.measured(cases, options.turns)
            if options.out:
                known = {
                    "starts": list(map(asdict, starts)),
                    "measured": list(map(asdict, measured)),
                }
                options.out.write_text(json.dumps(known))
    for case in cases:
        out.write("\n".join(report(case, measured)) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
