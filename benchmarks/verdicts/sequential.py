"""Change point detectors on real histories, fed commit by commit.

    python benchmarks/verdicts/sequential.py FOLDER [--sources even|odd|all|0,2,5] [--frontier]
    python benchmarks/verdicts/sequential.py FOLDER --without-rules --false
    python benchmarks/verdicts/sequential.py FOLDER --detectors '' --seconds 10000
    python benchmarks/verdicts/sequential.py FOLDER --detectors ours,hindsight,windowed,bocpd,otava
    python benchmarks/verdicts/sequential.py FOLDER --detectors '' --switching 400

FOLDER has series.json (`{id, source, unit, values}`) and labels.json (by id: `clear`, `possible`),
or is a folder in the format of the Turing Change Point Dataset, whose marks of all annotators are
possible and those of most of them clear, or a SQLite database of nights, whose series have a mark
where a comparison of commits at most five apart was slower or faster. Sources with even numbers
were used for development, odd ones are held out; both are reported apart. `--frontier` repeats ours
with other constants, `--without-rules` with each rule switched off, `--false` lists ours that are
far from all marks, `--seconds N` is the time for the first 100 values of N series. `--switching N`
follows N series on two levels, and steps of 10 % after few steady values, with several constants.
apache-otava is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from labelled import MARGIN, f1, public
from numpy.typing import NDArray
from scipy import special
from yardsticks import otava, windowed_t

from flexq_bench.db.engine import open_database
from flexq_bench.db.queries.series import list_series, series_histories
from flexq_bench.db.queries.verdicts import comparisons_of
from flexq_bench.stats import follower, newest_step
from flexq_bench.stats.change_points import change_points
from flexq_bench.stats.follower import Follower
from flexq_bench.stats.log_series import SMALLEST_LOG_RATIO
from flexq_bench.stats.newest_step import FEWEST_POINTS
from flexq_bench.verdicts.change_points import Point, find_change_points
from flexq_bench.verdicts.commit_points import one_per_commit

Floats = NDArray[np.float64]
Looks = list[dict[int, float]]  # at each look: p-values by index
Detector = Callable[[Floats], Looks]

_LOOK_EVERY = 1
_CERTAIN = 1e-10
_HAZARD = 1 / 100  # of BOCPD: a change every hundred values
_KEPT = 300  # of BOCPD: run lengths
_BEFORE_FIRST = 5  # of BOCPD: values before the first change
# Rules that can be switched off, and the constants that do so.
RULES: dict[str, dict[str, float]] = {
    "it may be switching": {"LARGE": 0.0},
    "large changes sooner": {"LARGE": np.inf},
    "visits count": {"SPIKE_SIGMAS": np.inf},
    "share of the range": {"_LEAST_SHARE": 0.0},
    "share of a larger step": {"_LEAST_LATER": 0.0},
    "waiting and both shares": {"LARGE": 0.0, "_LEAST_SHARE": 0.0, "_LEAST_LATER": 0.0},
    "most counted": {"_MOST_COUNTED": np.inf},
}
FRONTIER: tuple[dict[str, float], ...] = (
    {"SELDOM": 0.001},
    {"SELDOM": 0.2},
    {"SETTLED": 18},
    {"SETTLED": 60},
    {"LARGE": 0.2},
    {"_LEAST_LATER": 0.25},
    {"_LEAST_LATER": 0.5},
    {"_REGULAR": 1.3},
    {"SIGNIFICANCE": 1e-4},
    {"SIGNIFICANCE": 1e-5},
    {"SIGNIFICANCE": 1e-4, "_LEAST_SHARE": 0.15},
    {"SIGNIFICANCE": 1e-4, "_MOST_COUNTED": 16},
)


@dataclass(frozen=True, slots=True)
class Marked:
    source: str
    values: Floats
    clear: Sequence[int]
    possible: Sequence[int]


@dataclass(slots=True)
class Score:
    """Counts over series. latencies: values of the new level until it was reported, by change."""

    values: int = 0
    clear: int = 0
    found: int = 0
    false: int = 0
    flicker: int = 0
    certain_flicker: int = 0
    latencies: list[int] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)

    def add(self, one: Marked, looks: Looks) -> None:
        self.values += one.values.size
        self.clear += len(one.clear)
        end = set(looks[-1])
        self.f1.append(f1({"clear": one.clear, "possible": one.possible}, sorted(end)))
        for mark in one.clear:
            near = [index for index in end if abs(index - mark) <= MARGIN]
            if near:
                end.remove(min(near, key=lambda index: abs(index - mark)))
                self.found += 1
            for seen, look in enumerate(looks, one.values.size + 1 - len(looks)):
                if any(abs(index - mark) <= MARGIN for index in look):
                    self.latencies.append(seen - mark)
                    break
        onsets = sorted({index for look in looks for index in look})
        far = [at for at in onsets if all(abs(at - mark) > MARGIN for mark in one.possible)]
        self.false += sum(
            at - before > MARGIN for before, at in zip([-MARGIN - 1, *far], far, strict=False)
        )
        for index in onsets:
            there = [index in look for look in looks]
            again = int(np.count_nonzero(np.diff(np.array([False, *there]).astype(int)) == 1)) - 1
            self.flicker += again
            if again and min(look.get(index, 1.0) for look in looks) < _CERTAIN:
                self.certain_flicker += again

    def row(self, name: str) -> str:
        missed = [10**6] * (self.clear - len(self.latencies))
        median = float(np.median([*self.latencies, *missed])) if self.clear else float("nan")
        return (
            f"| {name} | {self.found / max(self.clear, 1):.1%} | "
            f"{median if median < 10**6 else float('inf'):g} | "
            f"{1000 * self.false / max(self.values, 1):.2f} | {self.flicker} | "
            f"{self.certain_flicker} | {np.mean(self.f1):.3f} |\n"
        )


def nights(file: Path) -> Iterator[Marked]:
    """Series of a database's main lines, one value a commit."""
    with open_database(str(file)) as database, database.session() as session:
        histories = series_histories(session, [row.id for row in list_series(session)])
        compared = comparisons_of(session, histories, since=datetime(1970, 1, 1, tzinfo=UTC))
    for series, results in histories.items():
        points = one_per_commit(results)
        place = {point.commit: at for at, point in enumerate(points)}
        possible, clear = set[int](), set[int]()
        for one in compared.get(series, ()):
            if one.verdict in ("slower", "faster") and {one.base, one.head} <= place.keys():
                base, head = sorted((place[one.base], place[one.head]))
                possible.update(range(base + 1, head + 1))
                clear.update([head] if head - base <= MARGIN else [])
        apart = [at for at in sorted(clear) if not clear & set(range(at - MARGIN, at))]
        values = np.array([point.median_us for point in points])
        if values.size >= FEWEST_POINTS:
            yield Marked("0", values, apart, sorted(possible))


def marked(folder: Path) -> Iterator[Marked]:
    if folder.is_file():
        yield from nights(folder)
        return
    if not (folder / "series.json").exists():
        for name, values, annotations in public(folder):
            marks = [mark for own in annotations.values() for mark in own]
            clear = [
                mark
                for mark in dict.fromkeys(marks)
                if 2 * sum(any(abs(mark - one) <= MARGIN for one in own)
                           for own in annotations.values()) > len(annotations)
            ]  # fmt: skip
            distinct = [at for i, at in enumerate(sorted(clear)) if i == 0
                        or at - sorted(clear)[i - 1] > MARGIN]  # fmt: skip
            yield Marked(name, values[np.isfinite(values)], distinct, sorted(set(marks)))
        return
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    for one in json.loads((folder / "series.json").read_text(encoding="utf-8")):
        own = labels.get(str(one["id"]))
        if own is not None:
            values = np.array([np.nan if v is None else v for v in one["values"]], dtype=float)
            if np.isfinite(values).all():
                yield Marked(str(one["source"]), values, own["clear"], own["possible"])


def ours(values: Floats) -> Looks:
    """A decision depends on the values seen by then only, so one pass gives all looks."""
    positive = float(values.min()) > 0
    scaled = np.log(values) if positive else values / float(np.median(np.abs(values)))
    seen_by_now = Follower(scaled, SMALLEST_LOG_RATIO)
    looks: Looks = []
    for seen in range(FEWEST_POINTS, values.size + 1):
        seen_by_now.see(seen)
        looks.append(dict(seen_by_now.history.steps))
    return looks


def hindsight(values: Floats) -> Looks:
    """One look at the end, with all values."""
    return [{step.index: step.p_value for step in change_points(values, in_hindsight=True)}]


def look_by_look(detect: Callable[[Floats], list[int]]) -> Detector:
    def looks(values: Floats) -> Looks:
        return [
            dict.fromkeys(detect(values[:seen]), 1.0)
            for seen in range(FEWEST_POINTS, values.size + 1, _LOOK_EVERY)
        ]

    return looks


def bocpd(values: Floats) -> Looks:
    """Bayesian online detection (Adams and MacKay 2007), Gaussian with unknown mean and variance.

    A change is reported where the most likely run begins once that run has three values, and stays.
    """
    scaled = (values - np.median(values[:FEWEST_POINTS])) / max(
        1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2), 1e-12
    )
    log_run = np.zeros(1)
    mean, kappa, alpha, beta = np.zeros(1), np.full(1, 0.01), np.ones(1), np.ones(1)
    reported: dict[int, float] = {}
    looks: Looks = []
    for at, value in enumerate(scaled):
        spread = beta * (kappa + 1) / (alpha * kappa)
        freedom = 2 * alpha
        log_p = (
            special.gammaln((freedom + 1) / 2)
            - special.gammaln(freedom / 2)
            - np.log(np.pi * freedom * spread) / 2
            - (freedom + 1) / 2 * np.log1p((value - mean) ** 2 / (freedom * spread))
        )
        grown = log_run + log_p + np.log1p(-_HAZARD)
        begun = float(special.logsumexp(log_run + log_p + np.log(_HAZARD)))
        log_run = np.concatenate(([begun], grown))
        log_run -= special.logsumexp(log_run)
        beta = np.concatenate(([1.0], beta + kappa * (value - mean) ** 2 / (2 * (kappa + 1))))
        mean = np.concatenate(([0.0], (kappa * mean + value) / (kappa + 1)))
        kappa, alpha = np.append(0.01, kappa + 1), np.append(1.0, alpha + 0.5)
        kept = slice(0, _KEPT)
        log_run, mean, kappa, alpha, beta = (
            one[kept] for one in (log_run, mean, kappa, alpha, beta)
        )
        length = int(np.argmax(log_run))
        start = at + 1 - length
        lasts = newest_step.SHORTEST_LEVEL <= length < _KEPT - 1
        if lasts and start >= _BEFORE_FIRST:
            known = [at for at in reported if abs(at - start) <= MARGIN]
            reported.setdefault(known[0] if known else start, 1.0)
        if at + 1 >= FEWEST_POINTS:
            looks.append(dict(reported))
    return looks


DETECTORS: dict[str, Detector] = {
    "ours": ours,
    "hindsight": hindsight,
    "windowed": look_by_look(windowed_t),
    "bocpd": bocpd,
    "otava": look_by_look(otava),
}


@contextmanager
def constants(changes: dict[str, float]) -> Iterator[None]:
    """The detector with other constants."""
    before = {
        (module, name): getattr(module, name)
        for name in changes
        for module in (follower, newest_step)
        if hasattr(module, name)
    }
    for module, name in before:
        setattr(module, name, changes[name])
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def score(series: Sequence[Marked], detect: Detector) -> Score:
    total = Score()
    for one in series:
        total.add(one, detect(one.values))
    return total


def first_slower(values: NDArray[np.floating]) -> int | None:
    """Number of values that were seen when a step for the worse was first reported."""
    seen_by_now = Follower(np.log(values), SMALLEST_LOG_RATIO)
    for seen in range(FEWEST_POINTS, values.size + 1):
        seen_by_now.see(seen)
        if any(level.effect > 0 and level.is_reported for level in seen_by_now.levels):
            return seen
    return None


def slower_of_switching(count: int, chance: float, apart: float) -> float:
    """Share of series of 60 values on two levels that have a step for the worse at some look."""
    slower = 0
    for seed in range(count):
        rng = np.random.default_rng(5000 + seed)
        upper = (np.cumsum(rng.random(60) < chance) + rng.integers(2)) % 2
        values = (1 + apart * upper) * np.exp(0.005 * rng.standard_normal(60))
        slower += first_slower(values) is not None
    return slower / count


def wait_after(steady: int) -> float:
    """Median number of values until a step of 10 % (sigma 1 %) after steady ones is reported."""
    waits = []
    for seed in range(9):
        noise = np.random.default_rng(seed).standard_normal(steady + 80)
        values = (1 + 0.1 * (np.arange(noise.size) >= steady)) * np.exp(0.01 * noise)
        waits.append((first_slower(values) or 10**6) - steady)
    return float(np.median(waits))


def switching(count: int) -> Iterator[str]:
    """A row for each of several constants: shares of switching series, and waits after steps."""
    kinds = ((0.2, 0.15), (0.1, 0.15), (0.1, 0.25))
    steady = (10, 15, 20, 30, 60)
    yield "| settled after | chance, distance: "
    yield " | ".join(f"{chance:.0%}, {apart:.0%}" for chance, apart in kinds)
    yield "".join(f" | wait after {number}" for number in steady) + " |\n"
    yield "| ---: |" + " ---: |" * (len(kinds) + len(steady)) + "\n"
    for settled in (18, 24, 30, 40):
        with constants({"SETTLED": settled}):
            shares = [slower_of_switching(count, *kind) for kind in kinds]
            waits = [wait_after(number) for number in steady]
        cells = [f"{share:.1%}" for share in shares] + [f"{wait:g}" for wait in waits]
        yield f"| {settled} | " + " | ".join(cells) + " |\n"


def false_onsets(series: Sequence[Marked]) -> Iterator[str]:
    """A row for each onset at any look that is far from all marks."""
    for number, one in enumerate(series):
        first: dict[int, tuple[int, float]] = {}
        looks = ours(one.values)
        for seen, look in enumerate(looks, FEWEST_POINTS):
            for at, p_value in look.items():
                first.setdefault(at, (seen, p_value))
        for at, (seen, p_value) in sorted(first.items()):
            nearest = min((abs(at - mark) for mark in one.possible), default=one.values.size)
            if nearest > MARGIN:
                before, after = (float(np.median(one.values[a:b])) for a, b in
                                 ((max(at - 20, 0), at), (at, min(at + 20, seen))))  # fmt: skip
                stays = "stays" if at in looks[-1] else "withdrawn"
                change = (after - before) / abs(before) if before else float("nan")
                yield (
                    f"| {one.source} | {number} | {at} | {seen - at} | {p_value:.0e} | "
                    f"{change:+.1%} | {nearest} | {stays} |\n"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sources", default="all", metavar="even|odd|all|0,2,5")
    parser.add_argument("--detectors", default="ours,bocpd", metavar="NAME,...")
    parser.add_argument("--frontier", action="store_true")
    parser.add_argument("--without-rules", action="store_true")
    parser.add_argument("--false", action="store_true", dest="lists_false")
    parser.add_argument("--seconds", type=int, metavar="N")
    parser.add_argument("--switching", type=int, metavar="N")
    arguments = parser.parse_args()
    everything = list(marked(arguments.folder))
    halves: tuple[list[Marked], list[Marked]] = [], []
    for one in everything:
        halves[not one.source.isdigit() or int(one.source) % 2].append(one)
    even, odd = halves
    if arguments.sources in ("even", "odd", "all"):
        parts = {"development (even sources)": even, "held out (odd sources)": odd}
        if arguments.sources != "all":
            parts = {name: part for name, part in parts.items() if arguments.sources in name}
    else:
        chosen = set(arguments.sources.split(","))
        parts = {arguments.sources: [one for one in everything if one.source in chosen]}
    out = sys.stdout.write
    if arguments.seconds:
        series = [[Point(value) for value in one.values[:100].tolist()] for one in everything]
        begun = time.process_time()
        for number in range(arguments.seconds):
            find_change_points(series[number % len(series)])
        out(f"{arguments.seconds} series: {time.process_time() - begun:.1f} s of CPU\n")
    if arguments.switching:
        for text in switching(arguments.switching):
            out(text)
            sys.stdout.flush()
    for title, part in parts.items():
        if not part or not (arguments.detectors or arguments.frontier or arguments.without_rules):
            continue
        clear = sum(len(one.clear) for one in part)
        out(f"\n{title}: {len(part)} series, {clear} clear changes\n\n")
        out("| detector | found | latency | false / 1,000 | flicker | of p < 1e-10 | F1 |\n")
        out("| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n")
        for name in filter(None, arguments.detectors.split(",")):
            try:
                out(score(part, DETECTORS[name]).row(name))
            except ImportError:
                continue
            sys.stdout.flush()
        if arguments.lists_false:
            out("\n| source | series | onset | values until seen | p | change | to a mark | |\n")
            out("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n")
            out("".join(false_onsets(part)) + "\n")
        others: dict[str, dict[str, float]] = {}
        if arguments.without_rules:
            others |= {f"without: {name}": changes for name, changes in RULES.items()}
        if arguments.frontier:
            others |= {f"with {changes or 'the defaults'}": changes for changes in FRONTIER}
        for name, changes in others.items():
            with constants(changes):
                out(score(part, ours).row(name))


if __name__ == "__main__":
    main()
