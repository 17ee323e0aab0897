"""Loss of the configurations chosen without tuning, and the tables behind the choice.

    python benchmarks/kernels/heuristic.py measure --out times.json.gz [--kernel NAME]
        [--m 1,8,16,24,32,64,128,512] [--shapes 120] [--seed 1] [--seconds N] [--in-turn]
    python benchmarks/kernels/heuristic.py report [times.json.gz...] [--kernel NAME]
    python benchmarks/kernels/heuristic.py retime [--kernel NAME] [--m 8,16] [--shapes 20]
        [--seed 1] [--seconds N] [--out times.json.gz] [--in-turn]
    python benchmarks/kernels/heuristic.py complete PATTERN times.json.gz [--kernel NAME]
        [--seconds N]
    python benchmarks/kernels/heuristic.py table times.json.gz... [--kernel NAME] [--most 80]
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
kernels/cuda/timed_cases, without the layers of papers, so that they are shapes that the choice was
not fitted to; for many tokens cases with times of three quarters of the candidates, at most --most
for each number of tokens. `select`
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from untuned_loss import OF_TABLES, chosen, loss_again, own_configs, report_rows

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.imma.configuration_choice import MAX_NATURAL
from flexq_bench.kernels.cuda.imma.configurations import (
    MMA_TOKENS,
    ClusterConfig,
    ImmaConfig,
    TiledConfig,
)
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.cuda.timed_choice import MANY_TOKENS, PER_UNIT, TimedCases, name_of
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
        yield [gemm.m, gemm.n, gemm.k, name_of(config), microseconds]


def drawn_cases(
    tokens: Sequence[int], shapes: int, seed: int, in_turn: bool
) -> Iterator[GemmWorkload]:
    """Random shapes at each number of tokens, or each at the next one alone."""
    for place, (n, k) in enumerate(random_shapes(shapes, seed)):
        for m in [tokens[place % len(tokens)]] if in_turn else tokens:
            yield GemmWorkload(m, n, k)


def prepared_linear(meter: Meter, kernel: str, gemm: GemmWorkload) -> PreparedCase:
    """Prepare a linear layer, which takes one GPU."""
    prepared = meter.prepare(Case(kernel, gemm))
    assert isinstance(prepared, PreparedCase)
    return prepared


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
            rows += rows_of(gemm, time_case(gemm, prepared_linear(meter, kernel, gemm)))
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
            if re.match(pattern, name_of(config)) and name_of(config) not in names:
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
    by_name = {name_of(config): config for config in own_configs(kernel)[0]}
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


def few_cases(
    times: Times, devices: Devices, few: Sequence[Config], others: Sequence[Config], most: int
) -> TimedCases:
    """Return cases where configurations for few tokens were timed, a shape's largest number of
    tokens of at most `most` as that number. Layers of papers only where nothing else was timed."""
    configs = (*few, *others)
    papers = {(shape.n, shape.k) for name in PAPERS for shape in load_suite(name).shapes}
    rows: dict[tuple[int, int], GemmWorkload] = {}
    for gemm in sorted(times, key=lambda gemm: gemm.m):
        if gemm.m <= most and any(c in times[gemm] for c in few):
            rows[gemm.n, gemm.k] = gemm
    rows = {shape: gemm for shape, gemm in rows.items() if shape not in papers} or rows
    return cases_of(times, devices, configs, [*rows.values()], most)


def many_cases(times: Times, devices: Devices, kernel: ImmaGemm, most: int) -> TimedCases:
    """Return cases for many tokens, of the same random shapes for all of them."""
    shapes = sorted({(gemm.n, gemm.k) for gemm in times})
    random.Random(0).shuffle(shapes)
    order = {shape: place for place, shape in enumerate(shapes)}
    kept: list[GemmWorkload] = []
    of_m: Counter[int] = Counter()
    for gemm in sorted(times, key=lambda gemm: (gemm.m, order[gemm.n, gemm.k])):
        in_order = kernel.choice.in_mma_order(gemm.m, gemm.k)
        candidates = kernel.choice.for_gemm(gemm, devices[gemm].sms, in_mma_order=in_order)
        candidates = [c for c in candidates if not is_for_few_outputs(c)]
        timed = sum(c in times[gemm] for c in candidates)
        if in_order and of_m[gemm.m] < most and timed >= MIN_TIMED_SHARE * len(candidates):
            kept.append(gemm)
            of_m[gemm.m] += 1
    configs = tuple(c for c in kernel.choice.costs if not isinstance(c, TiledConfig))
    return cases_of(times, devices, configs, kept)


def cases_of(
    times: Times,
    devices: Devices,
    configs: Sequence[Config],
    gemms: Sequence[GemmWorkload],
    tokens: int | None = None,
) -> TimedCases:
    """Return the times of these cases. tokens: of all of them; None: their own."""
    us = [[times[gemm].get(config, math.nan) for config in configs] for gemm in gemms]
    cases = tuple(GemmWorkload(tokens or gemm.m, gemm.n, gemm.k) for gemm in gemms)
    of_cases = tuple(devices[gemm] for gemm in gemms)
    rows = np.array(us).reshape(-1, len(configs))
    return TimedCases(tuple(map(name_of, configs)), cases, of_cases, rows)


def write_table(times: Times, devices: Devices, kernel: str, most: int) -> None:
    """Write the groups of a kernel's table that the files have; the others stay."""
    configs, timed = own_configs(kernel)
    few = [c for c in configs if isinstance(c, ImmaConfig | WeightOnlyConfig)]
    tiled = [c for c in configs if isinstance(c, TiledConfig)]
    tables: dict[int, TimedCases] = {}
    for tiles in sorted({c.col_tiles for c in few}):
        tokens = MMA_TOKENS * tiles
        others = tiled if tokens == MAX_NATURAL else []
        of_tiles = [c for c in few if c.col_tiles == tiles]
        tables[tokens] = few_cases(times, devices, of_tiles, others, tokens)
    implementation = resolve(kernel, "cuda")
    if isinstance(implementation, ImmaGemm):
        tables[MANY_TOKENS] = many_cases(times, devices, implementation, most)
    tables = {group: table for group, table in tables.items() if table.cases}
    Path(str(timed.file)).write_text(write_tables(timed.tables | tables))
    say(", ".join(f"{group}: {len(table.cases)} cases" for group, table in tables.items()))


def write_tables(tables: Mapping[int, TimedCases]) -> str:
    """Format tables as read_tables of timed_choice.py reads them."""
    groups = []
    for tokens, table in tables.items():
        parts: dict[tuple[Device, tuple[int, ...]], list[list[int]]] = {}
        for gemm, device, us in zip(table.cases, table.devices, table.us, strict=True):
            timed = np.flatnonzero(~np.isnan(us))
            row = [gemm.m, gemm.n, gemm.k, *(round(PER_UNIT * x) for x in us[timed].tolist())]
            parts.setdefault((device, tuple(timed.tolist())), []).append(row)
        listed = ", ".join(
            f'{{"device": {json.dumps(device)}, "configs": {json.dumps(timed)}, '
            f'"rows": {_lines(rows)}}}'
            for (device, timed), rows in parts.items()
        )
        configs = _lines(table.configs)
        groups.append(f'{{"tokens": {tokens}, "configs": {configs}, "parts": [{listed}]}}')
    return f"[{', '.join(groups)}]\n"


def _lines(items: Iterable[Any]) -> str:
    joined = ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
    return f"[\n{joined}\n]"


def is_for_few_outputs(config: Config) -> bool:
    return isinstance(config, ClusterConfig) and config.for_few_outputs


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
        for added, lost in greedy(us / us.min(axis=1, keepdims=True) - 1, within):
            say(f"  {lost:7.2%}  {names[added]}")


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
    for name, count in (("report", "*"), ("table", "+")):
        verbs.add_parser(name).add_argument("times", type=Path, nargs=count)
    leaving_out.add_argument("times", type=Path, nargs="+")
    verbs.choices["table"].add_argument("--most", type=int, default=80)
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
    elif options.verb == "report" and not options.times:
        for line in report_rows([options.kernel] if options.kernel else OF_TABLES):
            say(line)
    elif options.verb == "table":
        write_table(*read(options.times, kernel), kernel, options.most)
    else:
        report(*read(options.times, kernel), kernel)


if __name__ == "__main__":
    main()
