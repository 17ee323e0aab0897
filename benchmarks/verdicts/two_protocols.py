"""Share of a large sweep's cases with a result, their time and precision, under two protocols.

    python benchmarks/verdicts/two_protocols.py plan --out FOLDER
    python benchmarks/verdicts/two_protocols.py measure --out FOLDER --part 1/4 [--seconds N]
    python benchmarks/verdicts/two_protocols.py measure --out FOLDER --old-tree TREE --every 13
    python benchmarks/verdicts/two_protocols.py report --out FOLDER
    python benchmarks/verdicts/two_protocols.py replay --out FOLDER [--seed N]

`plan` needs no GPU: it writes cases.json, the cases and their probes in the order of a run.
`measure` needs only torch, CuPy and NVML. It appends a line for each case to the file of its part,
and skips cases that are in any of the files. --old-tree: measure with another tree's code, for
example protocol 1 from

    git archive c6ae341 | tar -x -C TREE

--every 13 takes every 13th case; `report` compares those that both trees measured.

`replay` needs no GPU: it estimates the share of `ok` under the present numbers of the protocol.
Placements are drawn, with replacement, from those measured for a case, and each takes as long as
one took then.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

KERNELS = ("flexq", "cublaslt-w8a8", "cublaslt-fp8", "cublas-fp16")
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MAX_FEW_TOKENS = 16  # tokens up to which a case should take 1.2 s; above it is 2 s
SUITE = "paper-fig10"
MAX_WIDTH = 0.0025
CASES_FILE = "cases.json"
_EXTRA = (
    *("elapsed_s", "copies", "launches"),
    *("free_mhz", "case_mhz", "placement_mhz", "no_boost"),
)
Row = dict[str, Any]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write_plan(out: Path) -> None:
    from flexq_bench.runs.plan import with_probes
    from flexq_bench.workloads.case import Case
    from flexq_bench.workloads.gemm import GemmWorkload
    from flexq_bench.workloads.suites import load_suite

    shapes = sorted({(shape.n, shape.k) for shape in load_suite(SUITE).shapes})
    cases = [
        Case(kernel, GemmWorkload(m, n, k)) for n, k in shapes for m in TOKENS for kernel in KERNELS
    ]
    planned = with_probes(cases, "cuda")
    out.mkdir(parents=True, exist_ok=True)
    (out / CASES_FILE).write_text(json.dumps([case.key for case in planned], indent=0))
    say(f"{len(cases)} cases of {len(shapes)} shapes, and {len(planned) - len(cases)} probes")


def _planned_keys(file: Path) -> list[str]:
    if not file.exists():
        raise SystemExit(f"no {file}: run plan with this --out first")
    keys: list[str] = json.loads(file.read_text())
    return keys


def measure(options: argparse.Namespace) -> None:
    """Measure what is not there yet, until the seconds are over."""
    if options.old_tree is not None:
        sys.path.insert(0, str(options.old_tree))
    from flexq_bench.measure import Meter
    from flexq_bench.workloads.case import Case

    keys = _planned_keys(options.plan or options.out / CASES_FILE)
    is_old = options.old_tree is not None
    name = "old" if is_old else f"part-{options.part.replace('/', '-of-')}"
    done = {row["case"] for row in _rows(options.out, old=is_old)}
    if options.done is not None:
        done |= {row["case"] for row in _rows(options.done, old=is_old)}
    wanted = _of_old(keys, options.every) if is_old else _of_part(keys, options.part)
    stop_at = time.monotonic() + options.seconds
    meter = Meter("cuda")
    say(f"{meter.device_info.sku}, protocol {meter.protocol.version}")
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"{name}.jsonl").open("a") as file:
        for number, key in enumerate(wanted, 1):
            if key in done:
                continue
            if time.monotonic() > stop_at:
                say(f"the {options.seconds:g} s are over at case {number} of {len(wanted)}")
                return
            row = _measured(meter, Case.from_key(key), is_old)
            file.write(f"{json.dumps(row)}\n")
            file.flush()
            say(_line(row))
    say("complete")


def _measured(meter: Any, case: Any, is_old: bool) -> Row:
    tune_s = 0.0
    if is_old:  # an old tree doesn't tell how long it tuned: it tunes here, and remembers
        began = time.perf_counter()
        with meter.device_guard():
            meter.prepare(case).choose_config(meter.choices, meter.tuning_machine)
            meter.release_memory()
        tune_s = time.perf_counter() - began
    began = time.perf_counter()
    measured = meter.measure(case)
    wall_s = time.perf_counter() - began
    steps_s = measured.extra.get("steps_s", {})
    if not is_old:
        tune_s = steps_s.get("tune", 0.0)
        wall_s -= tune_s
    return {
        "case": case.key,
        "gpu": meter.device_info.sku,
        "protocol": measured.protocol_version,
        "status": measured.status,
        "detail": measured.detail,
        "regime": getattr(measured, "regime", None),
        "median_us": measured.median_us,
        "ci_us": [measured.ci_low_us, measured.ci_high_us],
        "floor_us": measured.floor_us,
        "placements_us": measured.placement_medians_us,
        "samples": measured.n_samples,
        "samples_us": [[round(us, 3) for us in times] for times in measured.samples_us],
        "invalid": measured.n_invalid,
        "gap_us": getattr(measured, "sample_gap_us", None),
        "sm_mhz": measured.sm_clock_mhz,
        "power_w": measured.power_w,
        "config": measured.config,
        "wall_s": round(wall_s, 4),
        "tune_s": round(tune_s, 4),
        "steps_s": steps_s,
        "extra": {name: measured.extra.get(name) for name in _EXTRA},
    }


def _of_part(keys: Sequence[str], part: str) -> list[str]:
    """Shapes stay together: they share their weights and floors."""
    number, parts = (int(word) for word in part.split("/"))
    shapes = list(dict.fromkeys(map(_shape, keys)))
    mine = set(shapes[number - 1 :: parts])
    return [key for key in keys if _shape(key) in mine]


def _of_old(keys: Sequence[str], every: int) -> list[str]:
    """Choose every n-th case, preceded by the floors of its shape under their old names."""
    chosen = [key for key in keys if not _is_probe(key)][::every]
    shapes = {_shape(key) for key in chosen}
    floors = [key.replace("[overlap]", "") for key in keys if _is_probe(key)]
    ordered: dict[str, None] = dict.fromkeys(key for key in floors if key.startswith("empty"))
    for shape in sorted(shapes):
        ordered |= dict.fromkeys(key for key in floors if _shape(key) == shape)
        ordered |= dict.fromkeys(key for key in chosen if _shape(key) == shape)
    return list(ordered)


def _shape(key: str) -> str:
    place = key.split(" ")[3]
    return place[place.index("n") :]


def _tokens(key: str) -> int:
    place = key.split(" ")[3]
    return int(place[1 : place.index("n")])


def _is_probe(key: str) -> bool:
    return key.startswith(("empty ", "read-"))


def _rows(folder: Path, *, old: bool) -> Iterator[Row]:
    for path in sorted(folder.glob("*.jsonl")):
        if (path.stem == "old") == old:
            yield from map(json.loads, path.read_text().splitlines())


def _width(row: Row) -> float:
    """Half the interval as a fraction of the median; infinite without a number."""
    (low, high), median = row["ci_us"], row["median_us"]
    return math.inf if median is None else max(high - median, median - low) / median


def _line(row: Row) -> str:
    if row["median_us"] is None:
        return f"{row['case']}: {row['status']}: {row['detail']}"
    steps = " ".join(f"{name} {seconds:.2f}" for name, seconds in row["steps_s"].items())
    return (
        f"{row['case']}: {row['median_us']:.2f} us ± {_width(row):.2%}, {row['status']} "
        f"{row['regime'] or ''}, {len(row['placements_us'])} placements, {row['samples']} samples, "
        f"{row['invalid']} left out, gap {row['gap_us'] or 0:.0f} us, "
        f"{row['sm_mhz'] or 0:.0f} MHz, {row['power_w'] or 0:.0f} W, "
        f"{row['wall_s']:.2f} s ({steps})"
    )


def report(out: Path) -> None:
    """The table of what is there; of the cases that both protocols have, both."""
    new = {row["case"]: row for row in _rows(out, old=False) if not _is_probe(row["case"])}
    old = {row["case"]: row for row in _rows(out, old=True) if not _is_probe(row["case"])}
    planned = [key for key in _planned_keys(out / CASES_FILE) if not _is_probe(key)]
    both = [key for key in planned if key in new and key in old]
    say(f"{len(new)} of {len(planned)} planned cases are measured")
    say("| cases | protocol | without a number | ok | sustained | median s, M <= 16 | M > 16 |")
    say("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    say(_summary("all", list(new.values())))
    if both:
        say(_summary("in both", [new[key] for key in both]))
        say(_summary("in both", [old[key] for key in both]))
    say("")
    say("| kernel | M <= 16: ok | median s | M > 16: ok | median s | beat their floor |")
    say("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kernel in KERNELS:
        mine = [row for row in new.values() if row["case"].startswith(f"{kernel} ")]
        cells = []
        for part in _by_tokens(mine):
            cells += [_share_ok(part), _median_s(part)]
        say(f"| {kernel} | {' | '.join(cells)} | {sum(map(_beats_floor, mine))} |")
    say("")
    _report_speeds(new)
    say("")
    say("seconds a case, mean, by step:")
    steps = dict.fromkeys(step for row in new.values() for step in row["steps_s"])
    for step in steps:
        few, many = (
            [row["steps_s"].get(step, 0.0) for row in part] for part in _by_tokens([*new.values()])
        )
        few_s, many_s = (statistics.fmean(part) if part else 0.0 for part in (few, many))
        most = MAX_FEW_TOKENS
        say(f"  {step}: {few_s:.3f} (M <= {most}), {many_s:.3f} (M > {most})")
    say("")
    say("cases that are not ok:")
    for row in new.values():
        if row["status"] != "ok" or row["regime"] != "boost":
            say(f"  {_line(row)}")


def _report_speeds(rows: Mapping[str, Row]) -> None:
    """Table of the first kernel against each other one and its floor: geometric mean, least."""
    first, *others = KERNELS
    say(f"| M | shapes | {first} x {' | x '.join(others)} | % of the read floor |")
    say(f"| ---: | ---: | {' | '.join(['---:'] * len(KERNELS))} |")
    for tokens in TOKENS:
        mine = [
            row for key, row in rows.items() if key.startswith(first) and _tokens(key) == tokens
        ]
        mine = [row for row in mine if row["median_us"]]
        cells = []
        for kernel in others:
            pairs = [(rows.get(row["case"].replace(first, kernel, 1)), row) for row in mine]
            ratios = [other["median_us"] / row["median_us"] for other, row in pairs if other]
            cells.append(_mean_and_least(ratios, 2))
        floors = [100 * row["floor_us"] / row["median_us"] for row in mine if row["floor_us"]]
        say(f"| {tokens} | {len(mine)} | {' | '.join(cells)} | {_mean_and_least(floors, 0)} |")


def _mean_and_least(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    return f"{statistics.geometric_mean(values):.{digits}f} ({min(values):.{digits}f})"


class _Replay:
    """Placements with the medians of a measured case, on a clock of their own."""

    launches = 1

    def __init__(self, row: Row, batch_s: float, rng: np.random.Generator) -> None:
        self._medians, self._batch_s, self._rng = row["placements_us"], batch_s, rng
        self._placement_s = row["wall_s"] / len(self._medians)
        self._us, self._now_s = 0.0, 0.0

    def now(self) -> float:
        return self._now_s

    @contextmanager
    def place(self, index: int) -> Iterator[Any]:
        self._now_s = max(self._now_s, index * self._placement_s)
        self._us = self._rng.choice(self._medians)
        yield self

    def sample(self, count: int, *, gap_us: float = 0.0) -> Any:
        from flexq_bench.measure.clocks import Batch

        self._now_s += self._batch_s
        return Batch((self._us,) * count, (None,) * count)


def replay(out: Path, seed: int) -> None:
    """Apply the stop rule of the present protocol to placements drawn from those measured."""
    from flexq_bench.measure.protocol import PROTOCOL_CUDA
    from flexq_bench.measure.sampling import sample_case
    from flexq_bench.measure.telemetry import NoSensor, Telemetry

    # Replayed samples of a placement are equal, so their number and device time say nothing.
    protocol = replace(PROTOCOL_CUDA, min_samples=1, min_device_s=0.0)
    rng, rows = np.random.default_rng(seed), []
    for row in _rows(out, old=False):
        if _is_probe(row["case"]) or not row["placements_us"]:
            continue
        case = _Replay(row, protocol.batch_s, rng)
        telemetry = Telemetry(NoSensor(), period_s=1.0, now=case.now)
        sampled = sample_case(case.place, protocol, telemetry, seed=seed, now=case.now, warm=True)
        width = sampled.interval.half_width / sampled.interval.estimate
        rows.append((sampled.converged, sampled.elapsed_s))
        if not sampled.converged:
            ended = f"{sampled.stopped}, {len(sampled.placements)} placements"
            say(f"  {row['case']}: ± {width:.2%}, {ended}")
    share = sum(ok for ok, _ in rows) / len(rows)
    seconds = [elapsed_s for _, elapsed_s in rows]
    middle, mean = statistics.median(seconds), statistics.fmean(seconds)
    say(f"{len(rows)} cases, {share:.1%} ok, {middle:.2f} s in the median, {mean:.2f} in the mean")


def _by_tokens(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    few = [row for row in rows if _tokens(row["case"]) <= MAX_FEW_TOKENS]
    return few, [row for row in rows if _tokens(row["case"]) > MAX_FEW_TOKENS]


def _summary(name: str, rows: Sequence[Row]) -> str:
    if not rows:
        return f"| {name} | | | | | | |"
    few, many = _by_tokens(rows)
    return (
        f"| {name}, {len(rows)} | {rows[0]['protocol']} "
        f"| {sum(row['median_us'] is None for row in rows)} | {_share_ok(rows)} "
        f"| {sum(row['regime'] == 'sustained' for row in rows)} "
        f"| {_median_s(few)} | {_median_s(many)} |"
    )


def _share_ok(rows: Sequence[Row]) -> str:
    good = sum(row["status"] == "ok" and _width(row) <= MAX_WIDTH for row in rows)
    return f"{good / len(rows):.1%}" if rows else ""


def _median_s(rows: Sequence[Row]) -> str:
    return f"{statistics.median(row['wall_s'] for row in rows):.2f}" if rows else ""


def _beats_floor(row: Row) -> bool:
    """Return True if the upper end of the row's interval is below the floor."""
    high, floor = row["ci_us"][1], row["floor_us"]
    return bool(high and floor and high < floor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plan", "measure", "report", "replay"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", type=Path, help="cases.json; default: in --out")
    parser.add_argument("--done", type=Path, help="a folder with what earlier calls measured")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--old-tree", type=Path)
    parser.add_argument("--every", type=int, default=13)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "plan":
        write_plan(given.out)
    elif given.what == "measure":
        measure(given)
    elif given.what == "replay":
        replay(given.out, given.seed)
    else:
        report(given.out)
