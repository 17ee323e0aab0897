"""Fresh, forked and sandboxed worker processes: how fast they start, and whether kernels are alike.

    python benchmarks/measure/process_starts.py --processes 60 --seconds 280 --out starts.json \\
        "flexq-imma-w6a6 gemm cold m4n4096k4096" "cublas-fp16 gemm cold m256n4096k14336"

Kinds: `fresh` have a new interpreter; `forked` come from a server; the others from a server in the
first kind of sandbox that works here, or the one that FLEXQ_BENCH_SANDBOX names. Some are started
alone, as those of a comparison after its first pair: printed are the median seconds from the
request to the first reply (device opened), to the first launch and to the first timed sample, with
the configuration and the launches of the process before. Then rounds: some processes of each kind
start together from new servers (with --after, those of all rounds at first). One of each kind, a
group, is placed some times, and their turns alternate: clocks that drift slow all of them alike.
Printed, after each group and for each case, for each kind against `forked`: the mean difference of
a group's times with 99 % bounds (Student's t over groups); at the end Kolmogorov-Smirnov and Mann-
Whitney tests of equal distributions, the number of slow processes (Fisher) for a kernel of two
speeds, and Kruskal-Wallis over the servers of forked ones.
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
CONFIDENCE = 0.98  # two-sided: each bound holds with 99 %
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
    """The mean time of a process's samples of a case. group: those whose turns alternated."""

    kind: str
    round: int
    group: int
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
    groups: Sequence[Sequence[WorkerProcess]]
    resources: ExitStack

    def measured(
        self, cases: Sequence[Case], options: argparse.Namespace
    ) -> Iterator[list[Measured]]:
        """Measure cases in one group after the other, and end all processes."""
        workers = [worker for group in self.groups for worker in group]
        learned: dict[str, tuple[int | None, float | None]] = {}
        with self.resources:
            for worker in workers:
                worker.request_identity()
            for worker in workers:
                worker.check_identity()
            for number, group in enumerate(self.groups):
                for case in cases:
                    launches, mhz = learned.get(case.key, (None, None))
                    sides = [
                        (
                            CaseSide(
                                *("base", case, {}),
                                launches=launches,
                                device_mhz=mhz,
                                learns=True,
                            ),
                            worker,
                        )
                        for worker in group
                    ]
                    times = interleaved(sides, options, random.Random(f"{self.number} {number}"))
                    yield [
                        Measured(
                            worker.name,
                            self.number,
                            number,
                            case.key,
                            statistics.fmean(mine) if mine else math.nan,
                        )
                        for worker, mine in zip(group, times, strict=True)
                    ]
                    learned[case.key] = sides[0][0].launches, sides[0][0].device_mhz
            for worker in workers:
                worker.finish()  # before any is waited for


def interleaved(
    sides: Sequence[tuple[CaseSide, WorkerProcess]],
    options: argparse.Namespace,
    draw: random.Random,
) -> list[list[float]]:
    """Times of the valid turns of a case in each process."""
    times: list[list[float]] = [[] for _ in sides]
    for side, worker in sides:
        side.begin_prepare(worker, None, check=False)
    for side, worker in sides:
        side.end_prepare(worker)
    order = [*range(len(sides))]
    for placement in range(options.placements):
        draw.shuffle(order)
        placed_alone: WorkerProcess | None = None
        for side, worker in (sides[at] for at in order):
            is_warm = placement > 0 or side.launches is not None  # the group before was just here
            side.begin_place(worker, placement, None, is_warm=is_warm)
            if side.launches is None:
                side.end_place(worker)
                side.sample(worker)
                for other, _ in sides:
                    other.launches, other.device_mhz = side.launches, side.device_mhz
                placed_alone = worker
        for side, worker in (sides[at] for at in order):
            if worker is not placed_alone:
                side.end_place(worker)
        for _ in range(options.turns):
            turn = {at: sides[at][0].sample(sides[at][1]).time_us for at in order}
            order.reverse()
            if not any(map(math.isnan, turn.values())):
                for at, time_us in turn.items():
                    times[at].append(time_us)
        for side, worker in sides:
            side.begin_leave(worker, inspect=False)
        for side, worker in sides:
            side.end_leave(worker)
    for side, worker in sides:
        worker.ask("release", slot=side.slot)
    return times


def kinds_of(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def begin_round(number: int, options: argparse.Namespace) -> Round:
    with ExitStack() as stack:
        kinds = stack.enter_context(launchers(options.kinds))
        groups = [
            [
                stack.enter_context(worker_of(kind, launcher, options.device))
                for kind, launcher in kinds.items()
            ]
            for _ in range(options.together)
        ]
        return Round(number, groups, stack.pop_all())


def one_ahead(rounds: Iterator[Round]) -> Iterator[Round]:
    """Rounds, each of which imports while the one before is measured."""
    waiting = next(rounds, None)
    while waiting is not None:
        following = next(rounds, None)
        yield waiting
        waiting = following


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


def counted(measured: Sequence[Measured], case: str) -> list[Measured]:
    """Times of a case that count."""
    return [m for m in measured if m.case == case and not math.isnan(m.time_us)]


def report(case: Case, measured: Sequence[Measured]) -> Iterator[str]:
    """Lines of the report on one case."""
    mine = counted(measured, case.key)
    yield f"\n{case.key}"
    times: dict[str, list[float]] = {}
    for m in mine:
        times.setdefault(m.kind, []).append(m.time_us)
    for kind, some in times.items():
        mean, spread = np.mean(some), 100 * np.std(some) / np.mean(some)
        yield f"{kind:12} {len(some):4} processes {mean:9.3f} us, sd {spread:.2f} %"
    yield from differences(mine)
    yield from comparisons(times)
    by_round = [
        [m.time_us for m in mine if (m.kind, m.round) == (FORKED, number)]
        for number in dict.fromkeys(m.round for m in mine)
    ]
    if len(by_round) > 1 and min(map(len, by_round)) > 1:
        p = stats.kruskal(*by_round).pvalue
        yield f"servers: Kruskal-Wallis p = {p:.3f} over {len(by_round)}"


def differences(measured: Sequence[Measured]) -> Iterator[str]:
    """Lines about each kind against forked processes, by groups of one case."""
    logs: dict[str, dict[tuple[int, int], float]] = {}
    for m in measured:
        logs.setdefault(m.kind, {})[m.round, m.group] = math.log(m.time_us)
    forked = logs.pop(FORKED, {})
    for kind, mine in logs.items():
        changes = [100 * (mine[group] - forked[group]) for group in mine.keys() & forked.keys()]
        if len(changes) > 1:
            mean, error = statistics.fmean(changes), float(stats.sem(changes))
            low, high = stats.t.interval(CONFIDENCE, len(changes) - 1, mean, max(error, 1e-9))
            yield (
                f"{kind} against {FORKED}: {mean:+.3f} % ({low:+.3f} to {high:+.3f}), "
                f"{len(changes)} groups"
            )


def comparisons(times: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Lines about the distribution of each kind against that of forked processes."""
    forked = times.get(FORKED, ())
    for kind in times.keys() - {FORKED} if len(forked) > 1 else ():
        yield (
            f"{kind} against {FORKED}: "
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
    parser.add_argument("--placements", type=int, default=2, help="of a process and case")
    parser.add_argument("--turns", type=int, default=6, help="of a placement")
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
    rounds = one_ahead(begin_round(number, options) for number in numbers)
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
            for group in each.measured(cases, options):
                measured += group
                for line in differences(counted(measured, group[0].case)):
                    out.write(f"{group[0].case}: {line}\n")
                out.flush()
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
