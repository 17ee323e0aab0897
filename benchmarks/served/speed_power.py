"""Power and false alarms of the speed half of `gate served`, by resampling measured blocks.

    python benchmarks/served/speed_power.py [--gates 1000] [--delay-percent 3] [--blocks FILE]
        [--real 0]

Two equal local servers are measured once (or blocks are read from FILE, where they are stored).
Each simulated gate draws its placements with replacement from these, exchanges base and head in
half of them, so that no difference between the two servers is left, and delays head's tokens. It
prints the share of gates that find the delay, the share that find one without it, and how many
placements a gate takes. Before that, --real gates of two local servers, and as many of which the
second is delayed, print a row each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.served.engines import EngineSpec
from flexq_bench.served.speed.gate import (
    Judged,
    Measured,
    SpeedReport,
    judge_looks,
    judge_speed,
)
from flexq_bench.served.speed.load import RequestTimes, Segment
from flexq_bench.served.speed.policy import SpeedTable
from flexq_bench.served.turns import BASE, HEAD, Places, taking_turns
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.verdicts.limits import exceeds

SERVER = Path(__file__).parents[2] / "tests" / "served" / "server.py"
TABLE = SpeedTable(
    name="short",
    lengths="fixed",
    prompt_tokens=8,
    new_tokens=20,
    concurrency=4,
    requests=8,
    warmup_requests=4,
    cooldown_s=0.0,
    limits={"median_ttft": 10.0},
)
REAL = TABLE.model_copy(update={"metrics": ("median_ttft", "median_tpot")})
TPOT_MS = 4.0
SERVED = ("--ttft-ms", "10", "--noise", "0.03")
_PLACEMENTS = 24  # as many as the last look has

Blocks = list[list[dict[str, list[Segment]]]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of simulated gates. found: any limit fails; placements: mean of a gate."""

    found: float
    of_metric: Mapping[str, float]
    placements: float


@contextmanager
def servers(*options: Sequence[str]) -> Iterator[list[EngineSpec]]:
    """Start a server for each list of options, and end them with the block."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SERVER), "--port", "0", *own], stdout=subprocess.PIPE, text=True
        )
        for own in options
    ]
    try:
        urls = [(one.stdout.readline() if one.stdout else "").split()[-1] for one in processes]
        yield [EngineSpec(f"server {i}", url=url) for i, url in enumerate(urls)]
    finally:
        for one in processes:
            one.kill()
            one.communicate()


def real_gate(
    percent: float, seed: int, *, table: SpeedTable = REAL, rules: InterleaveRules | None = None
) -> SpeedReport:
    """Gate two servers with noise of their own. percent: by which the second's tokens are later."""
    options = [
        (*SERVED, "--tpot-ms", str(tpot), "--noise-seed", str(noise))
        for noise, tpot in ((seed, TPOT_MS), (seed + 100, TPOT_MS * (1 + percent / 100)))
    ]
    with servers(*options) as (base, head), taking_turns(base, head, Places()) as turns:
        return judge_speed([table], turns, seed=seed, rules=rules)


def measured_blocks(seed: int = 0) -> Measured:
    """Return blocks of two servers with equal options."""
    # A limit of 0 decides nothing early, so that all placements are measured.
    table = TABLE.model_copy(update={"worse_percent": 1e-9, "limits": {}})
    rules = InterleaveRules(processes=_PLACEMENTS, looks=1)
    (measured,) = real_gate(0.0, seed, table=table, rules=rules).measured
    return measured


def delayed(segment: Segment, percent: float) -> Segment:
    """Return a segment whose tokens after the first came later."""

    def later(one: RequestTimes) -> RequestTimes:
        if one.tpot_s is None or one.e2e_s is None or one.ttft_s is None:
            return one
        added = (one.e2e_s - one.ttft_s) * percent / 100
        return replace(
            one,
            tpot_s=one.tpot_s * (1 + percent / 100),
            e2e_s=one.e2e_s + added,
            end_s=one.end_s + added,
        )

    return Segment(tuple(map(later, segment.times)))


def simulated_rates(measured: Measured, *, gates: int, percent: float, seed: int) -> Rates:
    """Return the rates of gates that are drawn from these placements, with head delayed."""
    judged = [Judged(measured.table, of) for of in measured.table.judged]
    values = _both_ways(measured, judged, percent)
    generator = np.random.default_rng(seed)
    count, rules = len(measured.placements), InterleaveRules()
    found, placements = 0, []
    of_metric = dict.fromkeys((one.metric.name for one in judged), 0)
    for _ in range(gates):
        drawn = generator.integers(count, size=rules.most_pairs)
        swapped = generator.integers(2, size=rules.most_pairs)
        reached = dict.fromkeys(judged, 0)

        def measure(wanted: Sequence[Judged], until: int) -> None:
            reached.update(dict.fromkeys(wanted, until))  # noqa: B023

        def chosen(one: Judged) -> list[list[tuple[float, float]]]:
            places = zip(swapped[: reached[one]], drawn[: reached[one]], strict=True)  # noqa: B023
            return [values[one][swap][place] for swap, place in places]

        def compared(one: Judged, comparison: Comparison) -> CaseComparison:
            case = measured.table.case("test", one.metric)
            return CaseComparison(case, "base", "head", comparison, confirm(comparison))

        results = judge_looks(judged, rules, measure, chosen, compared)
        fails = [
            exceeds(result.confirmation, one.limit)
            for one, result in zip(judged, results, strict=True)
        ]
        found += any(fails)
        placements.append(max(reached.values()))
        for one, fail in zip(judged, fails, strict=True):
            of_metric[one.metric.name] += fail
    shares = {name: hits / gates for name, hits in of_metric.items()}
    return Rates(found / gates, shares, float(np.mean(placements)))


def _both_ways(
    measured: Measured, judged: Sequence[Judged], percent: float
) -> dict[Judged, list[list[list[tuple[float, float]]]]]:
    """Return the values of each metric, as measured and with base and head exchanged."""
    ways: list[Blocks] = []
    for base, head in ((BASE, HEAD), (HEAD, BASE)):
        ways.append(
            [
                [
                    {BASE: block[base], HEAD: [delayed(one, percent) for one in block[head]]}
                    for block in blocks
                ]
                for blocks in measured.placements
            ]
        )
    return {
        one: [Measured(measured.table, way).values(one.metric) for way in ways] for one in judged
    }


def write_blocks(measured: Measured, path: Path) -> None:
    """Store the times of all requests."""
    rows = [
        [
            {
                side: [[asdict(one) for one in part.times] for part in parts]
                for side, parts in b.items()
            }
            for b in blocks
        ]
        for blocks in measured.placements
    ]
    path.write_text(json.dumps(rows))


def read_blocks(path: Path) -> Measured:
    """Read what `write_blocks` stored."""
    placements: Blocks = [
        [
            {
                side: [Segment(tuple(RequestTimes(**one) for one in part)) for part in parts]
                for side, parts in block.items()
            }
            for block in blocks
        ]
        for blocks in json.loads(path.read_text())
    ]
    return Measured(TABLE, placements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates", type=int, default=1000)
    parser.add_argument("--delay-percent", type=float, default=3.0)
    parser.add_argument("--blocks", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=int, default=0, help="gates of servers, without and with it")
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.real):
        for percent in (0.0, options.delay_percent):
            began = time.monotonic()
            report = real_gate(percent, seed)
            limits = ", ".join(
                f"{one.check.split(': ')[1]} {one.outcome} {one.change or 0.0:+.2f} % "
                f"({one.low or 0.0:+.2f} to {one.high or 0.0:+.2f})"
                for one in report.limits
            )
            placements = max(len(one.placements) for one in report.measured)
            sys.stdout.write(
                f"seed {seed}, delay {percent:g} %: {limits}; {placements} placements, "
                f"{time.monotonic() - began:.0f} s\n"
            )
            sys.stdout.flush()
    if not options.gates:
        return
    if options.blocks is not None and options.blocks.exists():
        measured = read_blocks(options.blocks)
    else:
        measured = replace(measured_blocks(options.seed), table=TABLE)
        if options.blocks is not None:
            write_blocks(measured, options.blocks)
    for percent in (0.0, options.delay_percent):
        rates = simulated_rates(
            measured, gates=options.gates, percent=percent, seed=options.seed + 1
        )
        single = ", ".join(f"{name} {100 * share:.1f} %" for name, share in rates.of_metric.items())
        sys.stdout.write(
            f"delay {percent:g} %: found in {100 * rates.found:.1f} % of {options.gates:,} gates "
            f"({single}), {rates.placements:.1f} placements a gate\n"
        )


if __name__ == "__main__":
    main()
