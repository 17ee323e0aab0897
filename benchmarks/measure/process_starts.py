"""Fresh and forked worker processes: how fast they start, and whether their kernels are as fast.

    python benchmarks/measure/process_starts.py --processes 60 --seconds 280 --out starts.json \\
        "flexq-imma-w6a6 gemm cold m4n4096k4096" "cublas-fp16 gemm cold m256n4096k14336"

Fresh and forked processes alternate. A fork server is replaced after every ten processes, so that
an effect of a server shows as a difference between servers. Prints, for each case and kind, the
median seconds from the request to the first reply (device opened), to the first results (compiled
and checked) and to the first timed sample; then tests of equal distributions of a process's mean
time: Kolmogorov-Smirnov, Mann-Whitney, the number of slow processes (Fisher) for a kernel of two
speeds, and Kruskal-Wallis over servers. `--ahead 4` saves time where only the distributions matter.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy import stats

import flexq_bench
from flexq_bench.measure.ab.blocks import CaseSide
from flexq_bench.measure.ab.worker_command import worker_command
from flexq_bench.measure.launcher import FreshProcesses, Launcher, forking_launcher
from flexq_bench.measure.worker_process import WorkerProcess
from flexq_bench.workloads.case import Case

TREE = Path(flexq_bench.__file__).resolve().parents[1]
BEGUN = time.perf_counter()
PROCESSES_PER_SERVER = 10
TIMEOUT_S = 600.0
MIN_GAP = 10.0  # of two speeds: their distance by the scatter about each


@dataclass(frozen=True, slots=True)
class Start:
    """A process: seconds since the request, and the mean time of its samples."""

    kind: str
    server: int
    reply_s: float
    checked_s: float
    sample_s: float
    time_us: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A worker that was started at a time, and imports until its first request."""

    worker: WorkerProcess
    kind: str
    server: int
    begun: float

    def measured(self, side: CaseSide, turns: int) -> Start:
        """Measure a case, and end the worker."""
        with self.worker as worker:
            worker.request_identity()
            worker.check_identity()
            reply_s = time.perf_counter() - self.begun
            side.begin_prepare(worker, None)
            side.end_prepare(worker)
            checked_s = time.perf_counter() - self.begun
            side.begin_place(worker, 0, None)
            side.end_place(worker)
            times = [side.sample(worker).time_us]
            sample_s = time.perf_counter() - self.begun
            times += [side.sample(worker).time_us for _ in range(turns - 1)]
        valid = [time_us for time_us in times if not math.isnan(time_us)]
        mean = statistics.fmean(valid) if valid else math.nan
        return Start(self.kind, self.server, reply_s, checked_s, sample_s, mean)


def start(kind: str, launcher: Launcher, server: int, device: str) -> Waiting:
    """Start a worker."""
    begun = time.perf_counter()
    command = (*worker_command(TREE), "--device", device, "--seed", "0")
    worker = WorkerProcess(kind, TREE, command, timeout_s=TIMEOUT_S, launcher=launcher)
    return Waiting(worker, kind, server, begun)


def starts_of(
    case: Case, device: str, processes: int, turns: int, *, ahead: int, until: float
) -> Iterator[Start]:
    """Alternate fresh and forked processes, until a time (of `time.perf_counter`).

    The first of each kind is left out: it compiles, or waits for the server's imports.
    """
    side = CaseSide("base", case)
    start("fresh", FreshProcesses(), 0, device).measured(side, turns)
    for server, first in enumerate(range(0, processes, PROCESSES_PER_SERVER)):
        with ExitStack() as stack:
            forking = stack.enter_context(forking_launcher(TREE))
            start("forked", forking, server, device).measured(side, 1)
            kinds = [("fresh", FreshProcesses()), ("forked", forking)]
            orders = [
                kinds if number % 2 else kinds[::-1]
                for number in range(first, min(first + PROCESSES_PER_SERVER, processes))
            ]
            coming = [each for order in orders for each in order]
            waiting: deque[Waiting] = deque()
            while (coming or waiting) and (waiting or time.perf_counter() < until):
                while coming and len(waiting) <= ahead and time.perf_counter() < until:
                    waiting.append(start(*coming.pop(0), server, device))
                yield waiting.popleft().measured(side, turns)


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


def report(case: Case, starts: Sequence[Start]) -> Iterator[str]:
    """Lines of the report on one case."""
    by_kind = {kind: [s for s in starts if s.kind == kind] for kind in ("fresh", "forked")}
    yield f"\n{case.key}"
    yield "kind       n  first reply s  checked s  first sample s  time us  sd %"
    for kind, some in by_kind.items():
        times = [s.time_us for s in some]
        reply, checked, sample = (
            statistics.median(values)
            for values in zip(*((s.reply_s, s.checked_s, s.sample_s) for s in some), strict=True)
        )
        yield (
            f"{kind:7} {len(some):4} {reply:13.2f} {checked:10.2f} {sample:15.2f} "
            f"{statistics.fmean(times):8.2f} {100 * np.std(times) / np.mean(times):5.2f}"
        )
    fresh, forked = ([s.time_us for s in by_kind[kind]] for kind in ("fresh", "forked"))
    yield (
        f"Kolmogorov-Smirnov p = {stats.ks_2samp(fresh, forked).pvalue:.3f}, "
        f"Mann-Whitney p = {stats.mannwhitneyu(fresh, forked).pvalue:.3f}, "
        f"means differ by {100 * (np.mean(forked) / np.mean(fresh) - 1):+.3f} %"
    )
    limit = limit_of_slow([*fresh, *forked])
    if limit is not None:
        slow = [sum(time_us > limit for time_us in some) for some in (fresh, forked)]
        table = [[slow[0], len(fresh) - slow[0]], [slow[1], len(forked) - slow[1]]]
        p = stats.fisher_exact(table).pvalue
        yield f"slow processes: {slow[0]} fresh, {slow[1]} forked, Fisher p = {p:.3f}"
    by_server: dict[int, list[float]] = {}
    for start in by_kind["forked"]:
        by_server.setdefault(start.server, []).append(start.time_us)
    if len(by_server) > 1:
        p = stats.kruskal(*by_server.values()).pvalue
        yield f"servers: Kruskal-Wallis p = {p:.3f} over {len(by_server)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=60)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--ahead", type=int, default=0, help="start this many before their use")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    for number, key in enumerate(options.cases):
        case = Case.from_key(key)
        share = (options.seconds - time.perf_counter() + BEGUN) / (len(options.cases) - number)
        starts = []
        for measured in starts_of(
            *(case, options.device, options.processes, options.turns),
            ahead=options.ahead,
            until=time.perf_counter() + share,
        ):
            starts.append(measured)
            sys.stderr.write(f"{measured}\n")
        results[key] = [asdict(start) for start in starts]
        sys.stdout.write("\n".join(report(case, starts)) + "\n")
        sys.stdout.flush()
        if options.out:
            options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
