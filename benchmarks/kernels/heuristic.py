"""What the int8 tensor-core kernels lose where nothing is tuned, and the fit behind the choice.

    python benchmarks/kernels/heuristic.py measure --out times.json.gz [--kernel NAME]
        [--m 1,8,16,24,32,64,128,512] [--shapes 120] [--seconds N]
    python benchmarks/kernels/heuristic.py report times.json.gz... [--kernel NAME]
    python benchmarks/kernels/heuristic.py fit times.json.gz... [--kernel NAME]

`measure` needs a GPU: it times every configuration of a kernel, flexq-imma-w6a6 unless another is
named, weights cold, over random layer shapes. `report` prints how much slower the choice without
tuning was than the fastest. `fit` prints new weights for kernels/cuda/few_heuristic.py and new
costs for kernels/cuda/imma_heuristic.py, and what they lose on shapes that they were not fitted to.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from kernels.contract import Config
from kernels.cuda.few_heuristic import FLEXQ, MINIFLOATS, Few, choose_few, features
from kernels.cuda.imma import ImmaGemm
from kernels.cuda.imma_configs import (
    LEAST_MANY,
    MMA_ROWS,
    MOST_NATURAL,
    AnyImmaConfig,
    ImmaConfig,
    TiledConfig,
    TileFormat,
    WgmmaConfig,
)
from kernels.cuda.imma_heuristic import Cost, choose, waves_of
from kernels.cuda.minifloat import MinifloatGemm
from kernels.cuda.weight_only import COL_TILES, WeightOnlyConfig
from kernels.registry import resolve
from workloads.gemm import GemmWorkload
from workloads.ranges import parse_ranges

TOKENS = "1,8,16,24,32,64,128,512"
KERNEL = "flexq-imma-w6a6"
SMALLEST, LARGEST = 2e6, 240e6  # weights of a layer
SOFTNESS = 0.012  # of the choice while fitting: scores closer than this share it
TOO_SLOW = 0.05

Times = dict[GemmWorkload, dict[Config, float]]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def random_shapes(count: int, seed: int) -> list[tuple[int, int]]:
    """N and K, log-uniform; most are multiples of 128, as in models."""
    drawn = random.Random(seed)
    shapes: list[tuple[int, int]] = []
    while len(shapes) < count:
        n, k = (int(2 ** drawn.uniform(9.5, 15.2)) for _ in range(2))
        step = 128 if drawn.random() < 0.8 else 16
        n, k = n // step * step, k // step * step
        if SMALLEST < n * k < LARGEST:
            shapes.append((n, k))
    return shapes


def own_configs(kernel: str) -> tuple[list[Config], Few]:
    """Every configuration of a kernel's own code, and what scores those for few tokens."""
    found = resolve(kernel, "cuda")
    if isinstance(found, ImmaGemm):
        return [*found.every_config()], found.few
    assert isinstance(found, MinifloatGemm), f"{kernel} has nothing to fit"
    return [c for tiles in COL_TILES for c in found.configs(tiles)], MINIFLOATS


def measure(
    out: Path, kernel: str, tokens: Sequence[int], shapes: int, seconds: float, seed: int
) -> None:
    from flexq_bench.measure import PROTOCOL_CUDA, Meter
    from workloads.case import Case

    # One case follows the other: the device stays warm.
    protocol = replace(PROTOCOL_CUDA, warm_up=PROTOCOL_CUDA.rewarm)
    meter, began, rows = Meter("cuda", protocol), time.monotonic(), []
    with meter.device_guard():
        for n, k in random_shapes(shapes, seed):
            for m in tokens:
                prepared = meter.prepare(Case(kernel=kernel, gemm=GemmWorkload(m, n, k)))
                for config, microseconds in prepared.time_candidates():
                    rows.append([m, n, k, str(config), microseconds])
            content = json.dumps({"sms": meter.device_info.sm_count, "times": rows})
            out.write_bytes(gzip.compress(content.encode(), mtime=0))
            if time.monotonic() - began > seconds:
                break
    say(f"{len(rows)} times in {out}")


def read(paths: Sequence[Path], kernel: str) -> tuple[Times, int]:
    """The times of all files, of one kind of GPU; where two have the same, the last one's."""
    by_name = {str(config): config for config in own_configs(kernel)[0]}
    times: Times = {}
    for path in paths:
        content = json.loads(gzip.decompress(path.read_bytes()))
        for m, n, k, name, microseconds in content["times"]:
            if name in by_name:  # a configuration may be gone since
                times.setdefault(GemmWorkload(m, n, k), {})[by_name[name]] = microseconds
    return times, content["sms"]


def chosen(kernel: str, configs: Sequence[Config], gemm: GemmWorkload, sms: int) -> Config:
    """What runs without tuning, of these configurations."""
    found = resolve(kernel, "cuda")
    if isinstance(found, ImmaGemm):
        of_imma = [c for c in configs if isinstance(c, AnyImmaConfig)]
        return choose(of_imma, gemm, sms, found.costs, found.few, found.tiles)
    of_floats = [c for c in configs if isinstance(c, WeightOnlyConfig)]
    return choose_few(of_floats, gemm, sms, MINIFLOATS)


def report(times: Times, sms: int, kernel: str) -> None:
    say("| M | shapes | mean loss | 95 % of shapes within | worst |")
    say("| ---: | ---: | ---: | ---: | ---: |")
    for m in sorted({gemm.m for gemm in times}):
        losses = [
            timed[chosen(kernel, list(timed), gemm, sms)] / min(timed.values()) - 1
            for gemm, timed in times.items()
            if gemm.m == m
        ]
        within, worst = np.quantile(losses, 0.95), max(losses)
        say(f"| {m} | {len(losses)} | {statistics.mean(losses):.1%} | {within:.1%} | {worst:.1%} |")


class Samples:
    """Features and relative times of every configuration at every shape with few tokens."""

    def __init__(self, times: Times, col_tiles: int, sms: int, few: Few) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.features: list[np.ndarray] = []
        self.losses: list[np.ndarray] = []
        for gemm, timed in times.items():
            scored = [
                c
                for c in timed
                if isinstance(c, ImmaConfig | WeightOnlyConfig) and c.col_tiles == col_tiles
            ]
            if scored:
                found = np.array([timed[c] for c in scored])
                self.shapes.append((gemm.n, gemm.k))
                self.features.append(np.array([features(c, gemm, sms, few) for c in scored]))
                self.losses.append(found / found.min() - 1)

    def lost(self, weights: np.ndarray, chosen: Sequence[int]) -> list[float]:
        """By the configuration of the lowest score, at each chosen index."""
        return [float(self.losses[i][np.argmin(self.features[i] @ weights)]) for i in chosen]

    def fit(self, chosen: Sequence[int]) -> np.ndarray:
        """Weights under which a soft choice of the lowest score loses least."""
        width = self.features[0].shape[1]

        def cost(weights: np.ndarray) -> tuple[float, np.ndarray]:
            total, slope = 0.0, np.zeros(width)
            for i in chosen:
                score = self.features[i] @ weights
                share = np.exp(-(score - score.min()) / SOFTNESS)
                share /= share.sum()
                price = self.losses[i] + 4 * np.maximum(0, self.losses[i] - TOO_SLOW)
                mean = float(share @ price)
                total += mean
                slope -= (share * (price - mean)) @ self.features[i] / SOFTNESS
            count = len(chosen)
            return (
                total / count + 2e-4 * float(weights @ weights),
                slope / count + 4e-4 * weights,
            )

        best = None
        for seed in range(6):
            start = np.random.RandomState(seed).uniform(0, 0.6, width)
            found = minimize(cost, start, jac=True, method="L-BFGS-B")
            if best is None or found.fun < best.fun:
                best = found
        assert best is not None
        return np.asarray(best.x)


class CostSamples:
    """Waves and relative times of the configurations of one kernel that `costs` knows."""

    def __init__(
        self,
        times: Times,
        kind: type,
        sms: int,
        costs: Mapping[AnyImmaConfig, Cost],
        tiles: TileFormat,
    ) -> None:
        self.configs = [config for config in costs if isinstance(config, kind)]
        rows = [
            (gemm, timed)
            for gemm, timed in times.items()
            if sum(config in timed for config in self.configs) > len(self.configs) / 2
        ]
        self.shapes = [(gemm.n, gemm.k) for gemm, _ in rows]
        us = np.array([[t.get(c, np.nan) for c in self.configs] for _, t in rows])
        us = us.reshape(-1, len(self.configs))
        self.missing = np.isnan(us)
        self.losses = np.nan_to_num(us / np.nanmin(us, axis=1, keepdims=True) - 1)
        waves = [
            [waves_of(c, costs[c], gemm, sms, tiles) for c in self.configs] for gemm, _ in rows
        ]
        self.waves = np.array([[(w.whole, w.resident, w.last, w.steps) for w in r] for r in waves])
        self.floor = np.array([[FLEXQ.read_us(gemm)] for gemm, _ in rows])
        known = [costs[config] for config in self.configs]
        self.known = np.array([(c.start_us, c.alone_us, c.each_us) for c in known]).ravel()

    def estimates(self, costs: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
        """As cost_us of kernels/cuda/imma_heuristic.py, of all configurations at once."""
        start, alone, each = costs.reshape(-1, 3).T
        whole, resident, last, steps = np.moveaxis(self.waves[chosen], 2, 0)
        busy = whole * np.maximum(alone, each * resident)
        busy = busy + (last > 0) * np.maximum(alone, each * last)
        us = ((start + steps * busy) ** 4 + self.floor[chosen] ** 4) ** 0.25
        return np.where(self.missing[chosen], np.inf, us)

    def lost(self, costs: np.ndarray, chosen: Sequence[int]) -> list[float]:
        """By the configuration of the lowest estimate, at each chosen index."""
        best = self.estimates(costs, chosen).argmin(axis=1)
        return [float(self.losses[i, j]) for i, j in zip(chosen, best, strict=True)]

    def fit(self, chosen: Sequence[int]) -> np.ndarray:
        """Costs near the known ones under which a soft choice of the lowest loses least."""
        price = self.losses[chosen] + 3 * np.maximum(0, self.losses[chosen] - 0.08)

        def cost(costs: np.ndarray) -> float:
            score = np.log(self.estimates(costs, chosen))
            share = np.exp(-(score - score.min(axis=1, keepdims=True)) / 0.03)
            share /= share.sum(axis=1, keepdims=True)
            away = np.log(costs / self.known)
            return float((share * price).sum() / len(chosen) + 0.02 * np.mean(away * away))

        found, bounds = self.known, [(0.05, 9.0)] * self.known.size
        for _ in range(4):
            found = minimize(cost, found, method="L-BFGS-B", bounds=bounds).x
        return np.asarray(found)


def folds(
    shapes: Sequence[tuple[int, int]], count: int = 4
) -> Iterator[tuple[list[int], list[int]]]:
    """Indices to fit to and to judge by; a shape is in one of the two."""
    distinct = sorted(set(shapes))
    random.Random(0).shuffle(distinct)
    for fold in range(count):
        held = set(distinct[fold::count])
        inside = [i for i, shape in enumerate(shapes) if shape not in held]
        yield inside, [i for i, shape in enumerate(shapes) if shape in held]


def fit(times: Times, sms: int, kernel: str) -> None:
    few = own_configs(kernel)[1]
    for col_tiles in few.weights:
        samples = Samples(times, col_tiles, sms, few)
        if not samples.shapes:
            continue
        weights = say_unseen(samples)
        say(f"{col_tiles}: ({', '.join(f'{w:.3f}' for w in weights)}),")
    found = resolve(kernel, "cuda")
    if isinstance(found, ImmaGemm):
        fit_costs(times, sms, found)


def fit_costs(times: Times, sms: int, kernel: ImmaGemm) -> None:
    few = {gemm: timed for gemm, timed in times.items() if LEAST_MANY < gemm.m <= MOST_NATURAL}
    border = kernel.few.many_rows * MMA_ROWS * sms
    parts = (
        (ImmaConfig, {gemm: timed for gemm, timed in few.items() if gemm.n <= border}),
        (TiledConfig, {gemm: timed for gemm, timed in few.items() if gemm.n > border}),
        (WgmmaConfig, {gemm: timed for gemm, timed in times.items() if gemm.m > MOST_NATURAL}),
    )
    for kind, seen in parts:
        of_kind = CostSamples(seen, kind, sms, kernel.costs, kernel.tiles)
        if not of_kind.shapes:
            continue
        fitted = say_unseen(of_kind).reshape(-1, 3)
        for config, (start, alone, each) in zip(of_kind.configs, fitted, strict=True):
            say(f"{config}: ({start:.3g}, {alone:.3g}, {each:.3g})")


def say_unseen(samples: Samples | CostSamples) -> np.ndarray:
    """Say what a fit loses on shapes that it hasn't seen; the fit to all of them."""
    unseen = [
        loss
        for fitted, held in folds(samples.shapes)
        for loss in samples.lost(samples.fit(fitted), held)
    ]
    say(
        f"{len(unseen)} shapes not fitted to: mean loss {statistics.mean(unseen):.1%}, "
        f"95 % within {np.quantile(unseen, 0.95):.1%}, worst {max(unseen):.1%}"
    )
    return samples.fit(range(len(samples.shapes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--m", default=TOKENS)
    measuring.add_argument("--shapes", type=int, default=120)
    measuring.add_argument("--seconds", type=float, default=400)
    measuring.add_argument("--seed", type=int, default=1)
    for name in ("report", "fit"):
        verbs.add_parser(name).add_argument("times", type=Path, nargs="+")
    for verb in verbs.choices.values():
        verb.add_argument("--kernel", default=KERNEL)
    options = parser.parse_args()
    kernel = options.kernel
    if options.verb == "measure":
        tokens = parse_ranges(options.m)
        measure(options.out, kernel, tokens, options.shapes, options.seconds, options.seed)
    else:
        (report if options.verb == "report" else fit)(*read(options.times, kernel), kernel)


if __name__ == "__main__":
    main()
