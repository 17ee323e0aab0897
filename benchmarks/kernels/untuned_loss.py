"""Loss of the choice without tuning: from tables alone, or timed again on a GPU.

heuristic.py prints both (`report` without files, `retime`).
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.imma.configuration_choice import bucket_of, choose_untuned
from flexq_bench.kernels.cuda.imma.configurations import ImmaConfig, TiledConfig
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.cuda.imma.time_estimates import load_cases
from flexq_bench.kernels.cuda.shape_interpolation import (
    TimedShapes,
    choose_by_timed_shapes,
    load_losses,
    settings_of,
)
from flexq_bench.kernels.cuda.weight_only.gemm import COL_TILES, WeightOnlyConfig, WeightOnlyGemm
from flexq_bench.kernels.registry import resolve
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
OF_CASES = ("flexq-imma-w6a6", "dual-w6a8", "atom-w4a4", "dgq-w4a8", "group-w4a8")
TILE_TOKENS = 8  # of a column tile
DRAWN = 20  # shapes, of which the worst is expected
FINALISTS, ROUNDS = 5, 7  # fastest candidates timed again with the choice, and how often

AnyFewConfig = ImmaConfig | WeightOnlyConfig


class Timeable(Protocol):
    """The methods of a PreparedCase that are used."""

    def time_candidates(self) -> Iterable[tuple[Config, float]]: ...

    def time_in_turn(self, configs: Sequence[Config], rounds: int) -> list[list[float]]: ...


def own_configs(kernel: str) -> tuple[list[Config], TimedShapes]:
    """Return a kernel's configurations, and the timed shapes that score those for few tokens."""
    implementation = resolve(kernel, "cuda")
    if isinstance(implementation, ImmaGemm):
        return [*implementation.every_config()], implementation.choice.timed
    assert isinstance(implementation, WeightOnlyGemm), f"{kernel} has nothing to choose"
    return [c for tiles in COL_TILES for c in implementation.configs(tiles)], implementation.timed


def left_out(kernel: str) -> dict[int, list[float]]:
    """Losses of the choice at each shape of a kernel's table of timed shapes, which is left out of
    it; by column tiles."""
    configs, timed = own_configs(kernel)
    known = {settings_of(c): c for c in configs if isinstance(c, AnyFewConfig | TiledConfig)}
    lost: dict[int, list[float]] = {}
    for col_tiles, table in load_losses(timed).items():
        for (n, k), device, row in zip(
            table.shapes, table.devices, table.lost.tolist(), strict=True
        ):
            there = {
                known[settings]: loss
                for settings, loss in zip(table.configs, row, strict=True)
                if settings in known and not math.isnan(loss)
            }
            gemm = GemmWorkload(TILE_TOKENS * col_tiles, n, k)
            choice = choose_by_timed_shapes([*there], gemm, device, timed, unseen=True)
            lost.setdefault(col_tiles, []).append(there[choice])
    return lost


def left_out_cases(kernel: str) -> dict[int, list[float]]:
    """Losses of the choice for many tokens at each case of a kernel's table, by the largest number
    of tokens with the same candidates. All cases of its shape are left out."""
    implementation = resolve(kernel, "cuda")
    assert isinstance(implementation, ImmaGemm), f"{kernel} has no kernel for many tokens"
    table = load_cases(implementation.choice.many)
    lost: dict[int, list[float]] = {}
    for gemm, device, row in zip(table.cases, table.devices, table.us.tolist(), strict=True):
        there = {c: us for c, us in zip(table.configs, row, strict=True) if not math.isnan(us)}
        chosen = choose_untuned(
            [*there], gemm, device, implementation.choice, implementation.tiles, unseen=True
        )
        assert not isinstance(chosen, ImmaConfig), "few tokens are in no table of cases"
        lost.setdefault(bucket_of(gemm.m), []).append(there[chosen] / min(there.values()) - 1)
    return dict(sorted(lost.items()))


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
        few = {TILE_TOKENS * tiles: losses for tiles, losses in left_out(kernel).items()}
        many = left_out_cases(kernel) if kernel in OF_CASES else {}
        for m, losses in (*few.items(), *many.items()):
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
