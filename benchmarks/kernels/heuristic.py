"""Loss of the configurations chosen without tuning, and the tables and fits behind the choice.

    python benchmarks/kernels/heuristic.py measure --out times.json.gz [--kernel NAME]
        [--m 1,8,16,24,32,64,128,512] [--shapes 120] [--seed 1] [--seconds N] [--in-turn]
    python benchmarks/kernels/heuristic.py report [times.json.gz...] [--kernel NAME]
    python benchmarks/kernels/heuristic.py retime [--kernel NAME] [--m 8,16] [--shapes 20]
        [--seed 1] [--seconds N] [--out times.json.gz] [--in-turn]
    python benchmarks/kernels/heuristic.py complete PATTERN times.json.gz [--kernel NAME]
        [--seconds N]
    python benchmarks/kernels/heuristic.py table times.json.gz... [--kernel NAME]
    python benchmarks/kernels/heuristic.py cases times.json.gz... [--kernel NAME] [--most 80]
    python benchmarks/kernels/heuristic.py fit times.json.gz... [--kernel NAME]
    python benchmarks/kernels/heuristic.py select times.json.gz... [--within 0.002]
    python benchmarks/kernels/heuristic.py without PATTERN times.json.gz...

`measure`, `retime` and `complete` need a GPU. `measure` times every configuration of a kernel
(default flexq-imma-w6a6), with cold weights, over random layer shapes. `report` prints the
slow-down of the choice without tuning against the fastest configuration; each shape is judged as if
it were in no table. Without files it judges the shapes of the kernel's table, or of all tables.
`retime` prints the slow-down on new shapes, where the choice and the fastest are timed again, so
that none is the fastest by chance; its times are written, too, if a file is named. With --in-turn
both time each shape at one number of tokens only, the next of the list. `complete` times the
candidates whose names match a regular expression and which a case of the file lacks, cases in
random order, and adds them to the file. `table` writes the kernel's table in
kernels/cuda/*/timed_shapes, without the layers of papers, so that they are shapes that the choice
was not fitted to. `cases` writes its table for many tokens in kernels/cuda/imma/timed_cases: cases
with times of three quarters of the candidates, at most 80 for each number of tokens. `fit` prints
costs for kernels/cuda/imma/candidates.toml that fit the times of each configuration. `select`
prints a greedy selection of candidates among all timed ones. `without` prints how much slower the
fastest configuration would be without those whose names begin with a regular expression, for
example ClusterConfig.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize
from untuned_loss import (
    OF_CASES,
    OF_TABLES,
    TILE_TOKENS,
    AnyFewConfig,
    loss_again,
    own_configs,
    report_rows,
)

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.imma.configuration_choice import MAX_NATURAL, choose_untuned
from flexq_bench.kernels.cuda.imma.configurations import (
    AnyImmaConfig,
    ClusterConfig,
    TiledConfig,
)
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.cuda.imma.time_estimates import Cases, read_us, waves_of, write_cases
from flexq_bench.kernels.cuda.shape_interpolation import (
    Losses,
    choose_by_timed_shapes,
    settings_of,
    write_losses,
)
from flexq_bench.kernels.cuda.weight_only.gemm import WeightOnlyConfig
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.runtime.gpu import Device, current_device
from flexq_bench.measure import PROTOCOL_CUDA, Meter
from flexq_bench.measure.prepared import PreparedCase
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.ranges import parse_ranges
from flexq_bench.workloads.suites import load_suite

TOKENS = "1,8,16,24,32,64,128,512"
KERNEL = "flexq-imma-w6a6"
MIN_WEIGHTS, MAX_WEIGHTS = 2e6, 240e6  # of a layer
PAPERS = ("paper-fig10", "paper-fp6")
MAX_BANDWIDTH_ERROR = 0.05  # relative: drivers of one kind of GPU report clocks that differ by 2 %
COMPLETED_ROUNDS = 3  # of `complete`, which times few configurations of a case
MAX_LOSS = 1.0  # in a greedy choice: of a configuration that was not timed, too

COST_RANGE = 0.05, 20.0  # in microseconds
MIN_OUTLIER_ERROR = 0.15  # of a time's logarithm: outliers beyond
MIN_TIMES = 10  # of a configuration, for a fit to them
MIN_TIMED_SHARE = 0.75  # a share: of a case's candidates, that must have been timed

Times = dict[GemmWorkload, dict[Config, float]]
Devices = dict[GemmWorkload, Device]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def random_shapes(count: int, seed: int) -> list[tuple[int, int]]:
    """N and K, log-uniform; most are multiples of 128, as in models."""
    drawn = random.Random(seed)
    shapes: list[tuple[int, int]] = []
    while len(shapes) < count:
        n, k = (int(2 ** drawn.uniform(9.5, 15.2)) for _ in range(2))
        step = 128 if drawn.random() < 0.8 else 16
        n, k = n // step * step, k // step * step
        if MIN_WEIGHTS < n * k < MAX_WEIGHTS:
            shapes.append((n, k))
    return shapes


def warm_meter() -> Meter:
    """A meter for cases that follow one another, so that the device stays warm."""
    return Meter("cuda", replace(PROTOCOL_CUDA, warm_up=PROTOCOL_CUDA.rewarm))


def write_times(out: Path, rows: Sequence[Sequence[object]]) -> None:
    store(out, {**current_device()._asdict(), "times": rows})


def store(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))


def stored(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return content


def rows_of(gemm: GemmWorkload, times: Iterable[tuple[Config, float]]) -> Iterator[list[object]]:
    for config, microseconds in times:
        yield [gemm.m, gemm.n, gemm.k, named(config), microseconds]


def drawn_cases(
    tokens: Sequence[int], shapes: int, seed: int, in_turn: bool
) -> Iterator[GemmWorkload]:
    """Random shapes at each number of tokens, or each at the next one alone."""
    for place, (n, k) in enumerate(random_shapes(shapes, seed)):
        for m in [tokens[place % len(tokens)]] if in_turn else tokens:
            yield GemmWorkload(m, n, k)


def time_cases(
    out: Path | None,
    kernel: str,
    gemms: Iterable[GemmWorkload],
    seconds: float,
    time_case: Callable[[GemmWorkload, PreparedCase], Iterable[tuple[Config, float]]],
) -> list[list[object]]:
    """Time a kernel on each case until the seconds are over; return the rows of the file, which is
    written after each."""
    meter, began, rows = warm_meter(), time.monotonic(), list[list[object]]()
    with meter.device_guard():
        for gemm in gemms:
            rows += rows_of(gemm, time_case(gemm, meter.prepare(Case(kernel, gemm))))
            if out:
                write_times(out, rows)
            if time.monotonic() - began > seconds:
                break
    return rows


def retime(out: Path | None, kernel: str, gemms: Iterable[GemmWorkload], seconds: float) -> None:
    losses: dict[int, list[float]] = {}

    def time_case(gemm: GemmWorkload, prepared: PreparedCase) -> Iterable[tuple[Config, float]]:
        choose_here = partial(chosen, kernel, gemm=gemm, device=current_device())
        loss, times = loss_again(prepared, choose_here)
        losses.setdefault(gemm.m, []).append(loss)
        return times.items()

    time_cases(out, kernel, gemms, seconds, time_case)
    say_losses(losses)


def measure(out: Path, kernel: str, gemms: Iterable[GemmWorkload], seconds: float) -> None:
    def time_case(_: GemmWorkload, prepared: PreparedCase) -> Iterable[tuple[Config, float]]:
        return prepared.time_candidates()

    rows = time_cases(out, kernel, gemms, seconds, time_case)
    say(f"{len(rows)} times in {out}")


def complete(path: Path, kernel: str, pattern: str, seconds: float) -> None:
    """Add times of the candidates that match the pattern and that cases of a file lack."""
    content = stored(path)
    there, here = content["memory_gbps"], current_device().memory_gbps
    if not math.isclose(there, here, rel_tol=MAX_BANDWIDTH_ERROR):
        raise SystemExit(
            f"{path} has times of a GPU with {there:.0f} GB/s, this one has {here:.0f}: run it on "
            "the same kind of GPU"
        )
    lacking: dict[GemmWorkload, list[Config]] = {}
    for shape, names in read_names([path]).items():
        gemm = GemmWorkload(*shape)
        for config in resolve(kernel, "cuda").candidates(gemm):
            if re.match(pattern, named(config)) and named(config) not in names:
                lacking.setdefault(gemm, []).append(config)
    order = random.Random(0).sample(list(lacking), len(lacking))

    def time_case(gemm: GemmWorkload, prepared: PreparedCase) -> Iterable[tuple[Config, float]]:
        configs = lacking[gemm]
        medians = np.median(prepared.time_in_turn(configs, COMPLETED_ROUNDS), axis=0).tolist()
        return zip(configs, medians, strict=True)

    rows = time_cases(None, kernel, order, seconds, time_case)
    content["times"] += rows
    store(path, content)
    say(f"{len(rows)} times of {len(lacking)} cases added")


def read(paths: Sequence[Path], kernel: str) -> tuple[Times, Devices]:
    """The times of all files, and the GPU of each case; where two have the same, the last one's."""
    by_name = {named(config): config for config in own_configs(kernel)[0]}
    times: Times = {}
    devices: Devices = {}
    for path in paths:
        content = stored(path)
        device = Device(content["sms"], content["memory_gbps"])
        for m, n, k, name, microseconds in content["times"]:
            gemm = GemmWorkload(m, n, k)
            if devices.setdefault(gemm, device) != device:
                devices[gemm], times[gemm] = device, {}
            if name in by_name:  # a configuration may be gone since
                times.setdefault(gemm, {})[by_name[name]] = microseconds
    return times, devices


def named(config: Config) -> str:
    """Return the name in files: settings at their default are left out, so fields may be added."""
    settings = ", ".join(f"{name}={value}" for name, value in settings_of(config))
    return f"{type(config).__name__}({settings})"


def chosen(kernel: str, configs: Sequence[Config], gemm: GemmWorkload, device: Device) -> Config:
    """Return the one of `configs` that runs without tuning, on a shape that was never timed."""
    implementation = resolve(kernel, "cuda")
    if isinstance(implementation, ImmaGemm):
        of_imma = [c for c in configs if isinstance(c, AnyImmaConfig)]
        return choose_untuned(
            of_imma, gemm, device, implementation.choice, implementation.tiles, unseen=True
        )
    of_floats = [c for c in configs if isinstance(c, WeightOnlyConfig)]
    return choose_by_timed_shapes(of_floats, gemm, device, own_configs(kernel)[1], unseen=True)


def report(times: Times, devices: Devices, kernel: str) -> None:
    losses: dict[int, list[float]] = {}
    for gemm, timed in sorted(times.items(), key=lambda item: item[0].m):
        us = timed[chosen(kernel, list(timed), gemm, devices[gemm])]
        losses.setdefault(gemm.m, []).append(us / min(timed.values()) - 1)
    say_losses(losses)


def say_losses(losses: Mapping[int, Sequence[float]]) -> None:
    """Say a table of losses by the number of tokens."""
    say("| M | shapes | mean loss | 95 % of shapes within | worst |")
    say("| ---: | ---: | ---: | ---: | ---: |")
    for m, lost in losses.items():
        within, worst = np.quantile(lost, 0.95), max(lost)
        say(f"| {m} | {len(lost)} | {statistics.mean(lost):.1%} | {within:.1%} | {worst:.1%} |")


def losses(
    times: Times,
    devices: Devices,
    few: Sequence[AnyFewConfig],
    tiled: Sequence[TiledConfig],
    most: int,
) -> Losses:
    """Return losses of these configurations at shapes where those for few tokens were timed.

    A shape's largest number of tokens of at most `most` counts.

    Layers of papers only where nothing else was timed.
    """
    configs = (*few, *tiled)
    papers = {(shape.n, shape.k) for name in PAPERS for shape in load_suite(name).shapes}
    rows: dict[tuple[int, int], tuple[Device, np.ndarray]] = {}
    for gemm in sorted(times, key=lambda gemm: gemm.m):
        if gemm.m <= most and any(c in times[gemm] for c in few):
            us = np.array([times[gemm].get(c, np.nan) for c in configs])
            rows[gemm.n, gemm.k] = devices[gemm], us / np.nanmin(us) - 1
    rows = {shape: row for shape, row in rows.items() if shape not in papers} or rows
    lost = np.array([row for _, row in rows.values()])
    of_rows = tuple(device for device, _ in rows.values())
    return Losses(tuple(map(settings_of, configs)), tuple(rows), of_rows, lost)


def write_table(times: Times, devices: Devices, kernel: str) -> None:
    configs, timed = own_configs(kernel)
    few = [c for c in configs if isinstance(c, AnyFewConfig)]
    tiled = [c for c in configs if isinstance(c, TiledConfig)]
    tables: dict[int, Losses] = {}
    for tiles in sorted({c.col_tiles for c in few}):
        most = TILE_TOKENS * tiles
        others = tiled if most == MAX_NATURAL else []
        of_tiles = [c for c in few if c.col_tiles == tiles]
        tables[tiles] = losses(times, devices, of_tiles, others, most)
    tables = {tiles: table for tiles, table in tables.items() if table.shapes}
    Path(str(timed.file)).write_text(write_losses(tables))
    say(", ".join(f"{tiles}: {len(table.shapes)} shapes" for tiles, table in tables.items()))


def write_cases_of(times: Times, devices: Devices, kernel: str, most: int) -> None:
    """Write the table of cases for many tokens, of the same random shapes for all of them."""
    implementation = resolve(kernel, "cuda")
    assert isinstance(implementation, ImmaGemm), f"{kernel} has no kernel for many tokens"
    shapes = sorted({(gemm.n, gemm.k) for gemm in times})
    random.Random(0).shuffle(shapes)
    order = {shape: place for place, shape in enumerate(shapes)}
    chosen_cases: list[GemmWorkload] = []
    of_m: Counter[int] = Counter()
    for gemm in sorted(times, key=lambda gemm: (gemm.m, order[gemm.n, gemm.k])):
        in_order = implementation.choice.in_mma_order(gemm.m, gemm.k)
        candidates = implementation.choice.for_gemm(gemm, devices[gemm].sms, in_mma_order=in_order)
        candidates = [c for c in candidates if not is_for_few_outputs(c)]
        timed = sum(c in times[gemm] for c in candidates)
        if in_order and of_m[gemm.m] < most and timed >= MIN_TIMED_SHARE * len(candidates):
            chosen_cases.append(gemm)
            of_m[gemm.m] += 1
    configs = tuple(c for c in implementation.choice.costs if not isinstance(c, TiledConfig))
    us = [[times[gemm].get(c, math.nan) for c in configs] for gemm in chosen_cases]
    of_cases = tuple(devices[gemm] for gemm in chosen_cases)
    table = Cases(configs, tuple(chosen_cases), of_cases, np.array(us))
    Path(str(implementation.choice.many.file)).write_text(write_cases(table))
    say(f"{len(chosen_cases)} cases")


def is_for_few_outputs(config: Config) -> bool:
    return isinstance(config, ClusterConfig) and config.for_few_outputs


def estimated_us(costs: np.ndarray, waves: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Estimate times as cost_us of time_estimates.py, from arrays whose last axis is one
    configuration's costs or the fields of its Waves. floor: of reading, in microseconds."""
    start, alone, each = np.moveaxis(costs, -1, 0)
    whole, resident, last, steps, starts = np.moveaxis(waves, -1, 0)
    busy = whole * np.maximum(alone, each * resident)
    busy = busy + (last > 0) * np.maximum(alone, each * last)
    return np.asarray(((starts * start + steps * busy) ** 4 + floor**4) ** 0.25)


def fit_to_times(
    known: np.ndarray, waves: np.ndarray, floor: np.ndarray, us: np.ndarray
) -> np.ndarray:
    """Fit the costs of one configuration to the logarithms of its times, by least squares near the
    known costs; errors from MIN_OUTLIER_ERROR on count by their absolute value."""
    logs, known = np.log(us), np.log(np.clip(known, *COST_RANGE))  # a known cost may be 0

    def error(tried: np.ndarray) -> float:
        off = np.abs(np.log(estimated_us(np.exp(tried), waves, floor)) - logs)
        capped = np.minimum(off, MIN_OUTLIER_ERROR)
        return float(np.mean(capped * (2 * off - capped)) + 1e-3 * np.mean((tried - known) ** 2))

    begun = (known, known + np.array([-1.0, 0.2, 0.2]))
    results = [minimize(error, x, method="Nelder-Mead") for x in begun]
    return np.asarray(np.exp(min(results, key=lambda r: r.fun).x))


def select(paths: Sequence[Path], within: float) -> None:
    """Say what a greedy choice takes of all configurations in the files, candidates or not."""
    times = read_names(paths)
    groups: dict[str, list[str]] = {}
    for name in sorted({name for timed in times.values() for name in timed}):
        tiles = re.search(r"col_tiles=\d+", name) if not name.startswith("Tiled") else None
        groups.setdefault(f"{name.split('(')[0]} {tiles[0] if tiles else ''}", []).append(name)
    for group, names in groups.items():
        us = np.array([[timed.get(name, np.inf) for name in names] for timed in times.values()])
        us = us[np.isfinite(us).any(axis=1)]
        say(f"{group}: of {len(names)} configurations, over {len(us)} shapes and numbers of tokens")
        for chosen, lost in greedy(us / us.min(axis=1, keepdims=True) - 1, within):
            say(f"  {lost:7.2%}  {names[chosen]}")


def read_names(paths: Sequence[Path]) -> dict[tuple[int, int, int], dict[str, float]]:
    """The times of all files by M, N, K and the names of configurations, candidates or not."""
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for path in paths:
        for m, n, k, name, microseconds in stored(path)["times"]:
            times.setdefault((m, n, k), {})[name] = microseconds
    return times


def without(pattern: str, paths: Sequence[Path]) -> None:
    """Say how much slower the fastest configuration is without those whose names match."""
    factors: dict[int, list[float]] = {}
    for (m, _, _), timed in sorted(read_names(paths).items()):
        others = [us for name, us in timed.items() if not re.match(pattern, name)]
        if len(others) < len(timed) and others:
            factors.setdefault(m, []).append(min(others) / min(timed.values()))
    say("| M | shapes | geometric mean | least | most |")
    say("| ---: | ---: | ---: | ---: | ---: |")
    for m, of_m in factors.items():
        mean = statistics.geometric_mean(of_m)
        say(f"| {m} | {len(of_m)} | {mean:.2f} | {min(of_m):.2f} | {max(of_m):.2f} |")


def greedy(lost: np.ndarray, within: float) -> Iterator[tuple[int, float]]:
    """Columns of losses [shapes, configs], each the one that lowers the mean loss of the best so
    far the most, with that mean; until it is at most `within`."""
    lost = np.minimum(lost, MAX_LOSS)
    best = np.full(len(lost), MAX_LOSS)
    while best.mean() > within:
        means = np.minimum(best[:, None], lost).mean(axis=0)
        chosen = int(means.argmin())
        best = np.minimum(best, lost[:, chosen])
        yield chosen, float(best.mean())


def fit(times: Times, devices: Devices, kernel: str) -> None:
    """Say the costs of each configuration for many tokens that fit its times best."""
    implementation = resolve(kernel, "cuda")
    assert isinstance(implementation, ImmaGemm), f"{kernel} has no kernel for many tokens"
    for config, cost in implementation.choice.costs.items():
        own = {gemm: timed[config] for gemm, timed in times.items() if config in timed}
        if len(own) < MIN_TIMES:
            continue
        waves = [
            astuple(waves_of(config, cost, g, devices[g].sms, implementation.tiles)) for g in own
        ]
        floor = [read_us(gemm.n, gemm.k, devices[gemm].memory_gbps) for gemm in own]
        known = np.array([cost.start_us, cost.alone_us, cost.each_us])
        fitted = fit_to_times(known, np.array(waves), np.array(floor), np.array([*own.values()]))
        say(f"{config}: ({', '.join(f'{us:.3g}' for us in fitted)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, m, shapes in (("measure", TOKENS, 120), ("retime", "8,16", 20)):
        timing = verbs.add_parser(name)
        timing.add_argument("--out", type=Path, required=name == "measure")
        timing.add_argument("--m", default=m)
        timing.add_argument("--shapes", type=int, default=shapes)
        timing.add_argument("--seconds", type=float, default=400)
        timing.add_argument("--seed", type=int, default=1)
        timing.add_argument("--in-turn", action="store_true")
    completing, leaving_out = verbs.add_parser("complete"), verbs.add_parser("without")
    for verb in (completing, leaving_out):
        verb.add_argument("pattern")
    completing.add_argument("times", type=Path)
    completing.add_argument("--seconds", type=float, default=400)
    for name, count in (("report", "*"), ("table", "+"), ("cases", "+"), ("fit", "+")):
        verbs.add_parser(name).add_argument("times", type=Path, nargs=count)
    leaving_out.add_argument("times", type=Path, nargs="+")
    verbs.choices["cases"].add_argument("--most", type=int, default=80)
    selecting = verbs.add_parser("select")
    selecting.add_argument("times", type=Path, nargs="+")
    selecting.add_argument("--within", type=float, default=0.002)
    for verb in verbs.choices.values():
        verb.add_argument("--kernel")
    options = parser.parse_args()
    kernel = options.kernel or KERNEL
    if options.verb in ("measure", "retime"):
        run = measure if options.verb == "measure" else retime
        drawn = parse_ranges(options.m), options.shapes, options.seed
        run(options.out, kernel, drawn_cases(*drawn, options.in_turn), options.seconds)
    elif options.verb == "select":
        select(options.times, options.within)
    elif options.verb == "complete":
        complete(options.times, kernel, options.pattern, options.seconds)
    elif options.verb == "without":
        without(options.pattern, options.times)
    elif options.verb == "cases":
        write_cases_of(*read(options.times, kernel), kernel, options.most)
    elif options.verb == "report" and not options.times:
        every = dict.fromkeys((*OF_TABLES, *OF_CASES))
        for line in report_rows([options.kernel] if options.kernel else [*every]):
            say(line)
    else:
        of_times = {"report": report, "table": write_table, "fit": fit}[options.verb]
        of_times(*read(options.times, kernel), kernel)


if __name__ == "__main__":
    main()
