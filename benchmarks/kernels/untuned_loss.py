"""Loss of the choice without tuning: from tables alone, or timed again on a GPU.

heuristic.py prints both (`report` without files, `retime`).
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.imma.configuration_choice import bucket_of
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.cuda.timed_choice import TimedChoice, name_of
from flexq_bench.kernels.cuda.weight_only.gemm import COL_TILES, WeightOnlyGemm
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

OF_TABLES = (  # a kernel for each table
    "flexq-imma-w6a6",
    "dual-w6a8",
    "atom-w4a4",
    "dgq-w4a8",
    "group-w4a8",
    "fp6-w6a16",
    "fp6-w6a16[fine]",
    "w8a16",
    "w4a16",
)
DRAWN = 20  # shapes, of which the worst is expected
FINALISTS, ROUNDS = 5, 7  # fastest candidates timed again with the choice, and how often


class Timeable(Protocol):
    """The methods of a PreparedCase that are used."""

    def time_candidates(self) -> Iterable[tuple[Config, float]]: ...

    def time_in_turn(self, configs: Sequence[Config], rounds: int) -> list[list[float]]: ...


def own_configs(kernel: str) -> tuple[list[Config], TimedChoice]:
    """Return a kernel's configurations, and the timed cases by which it chooses."""
    implementation = resolve(kernel, "cuda")
    if isinstance(implementation, ImmaGemm):
        return [*implementation.every_config()], implementation.choice.timed
    assert isinstance(implementation, WeightOnlyGemm), f"{kernel} has nothing to choose"
    return [c for tiles in COL_TILES for c in implementation.configs(tiles)], implementation.timed


def chosen(kernel: str, configs: Sequence[Any], gemm: GemmWorkload, device: Device) -> Config:
    """Return the one of `configs` that runs without tuning, on a shape that was never timed."""
    implementation, timed = resolve(kernel, "cuda"), own_configs(kernel)[1]
    timed.is_blind = True
    try:
        if isinstance(implementation, ImmaGemm):
            return implementation.choice.choose(configs, gemm, device)
        found: Config = timed.choose_few(configs, gemm, device, configs[0].col_tiles)
        return found
    finally:
        timed.is_blind = False


def left_out(kernel: str, every: int = 1) -> dict[tuple[int, int], list[float]]:
    """Losses of the choice at the cases of a kernel's tables, by group and by the largest number of
    tokens with the same candidates. All cases of its shape are left out. every: case to judge."""
    configs, timed = own_configs(kernel)
    by_name = {name_of(config): config for config in configs}
    lost: dict[tuple[int, int], list[float]] = {}
    for group, table in timed.tables.items():
        names = [
            (column, by_name[name]) for column, name in enumerate(table.configs) if name in by_name
        ]
        for gemm, device, us in [*zip(table.cases, table.devices, table.us.tolist(), strict=True)][
            ::every
        ]:
            there = {config: us[column] for column, config in names if not math.isnan(us[column])}
            us_chosen = there[chosen(kernel, [*there], gemm, device)]
            loss = us_chosen / min(there.values()) - 1
            lost.setdefault((group, bucket_of(gemm.m)), []).append(loss)
    return dict(sorted(lost.items(), key=lambda item: (item[0][0] == 0, item[0])))


def expected_worst(losses: Sequence[float], drawn: int = DRAWN) -> float:
    """The mean of the largest loss over all subsets of `drawn`; if there are fewer, the largest."""
    ordered, drawn = sorted(losses), min(drawn, len(losses))
    chances = [math.comb(rank, drawn - 1) for rank in range(len(ordered))]
    return math.fsum(map(operator.mul, chances, ordered)) / sum(chances)


def report_rows(kernels: Sequence[str]) -> Iterator[str]:
    """The lines of a report on the losses at the shapes of each kernel's tables."""
    yield f"| kernel | M | shapes | mean loss | 95 % within | worst | worst of {DRAWN} |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kernel in kernels:
        for (_, m), losses in left_out(kernel).items():
            shares = statistics.mean(losses), np.quantile(losses, 0.95), max(losses)
            cells = [f"{share:.1%}" for share in (*shares, expected_worst(losses))]
            yield f"| {' | '.join([kernel, str(m), str(len(losses)), *cells])} |"


def loss_again(
    prepared: Timeable, choose: Callable[[Sequence[Config]], Config]
) -> tuple[float, dict[Config, float]]:
    """Time the choice and the fastest candidates again, in alternation; return the choice's loss,
    and the times of all candidates: where they were timed again, the medians.

    The fastest of many single times is partly the luckiest: the loss against it is too large.
    """
    times = dict(prepared.time_candidates())
    fastest = sorted(times, key=lambda config: times[config])[:FINALISTS]
    finalists = list(dict.fromkeys([choose([*times]), *fastest]))
    medians = np.median(prepared.time_in_turn(finalists, ROUNDS), axis=0).tolist()
    return medians[0] / min(medians) - 1, times | dict(zip(finalists, medians, strict=True))
