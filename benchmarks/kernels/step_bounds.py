"""Bounds of a step of K of the kernels by warpgroup MMA, counted from their machine code.

    python benchmarks/kernels/step_bounds.py [--kernel NAME] [--m 64,128] [--shapes NxK,...]
        [--gbps 4200] [--mhz 1755]

Needs no GPU. The first table is about a step of one persistent thread block on one SM, for each
number of tokens and configuration: instructions that a warp issues in the loop; cycles of the
tensor cores and of the instructions of one scheduler; the time of their sum, because the two
alternate on Hopper (docs/kernels/flexq-imma.md); the time of a step in candidates.toml, from a fit
to measured times; the bytes read. The second table has, for each shape, the configuration with the
fewest of these cycles: mean number of steps per block, their time, and the time of reading all
weights. A launch takes at least the longer of the two times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from flexq_bench.kernels.cuda.imma.configurations import (
    GROUP,
    MMA_ROWS,
    WGMMA_ARCH,
    ClusterConfig,
    PersistentConfig,
    TileFormat,
)
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.runtime.machine_code import innermost_loops
from flexq_bench.kernels.runtime.nvrtc import compile_build
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.ranges import parse_ranges

SMS = 132  # of an H200
MANY_ROWS = 1 << 16  # where configurations for few output tiles are no candidates
MMA = "IGMMA"  # int8 warpgroup MMA, 64 rows by a granule of tokens by 32 k
MMA_K, WARPGROUP_ROWS = 32, 64
# Of an SM for 64 rows, 32 k and one token: 64x128x32 takes 64 (benchmarks/kernels/issue_slots.cu).
TOKEN_CYCLES = 0.5
SHAPES = "4096x14336,8192x8192,12288x4096,5120x13824,28672x8192"

Blocks = ClusterConfig | PersistentConfig


@dataclass(frozen=True, slots=True)
class Step:
    """One group of k of a block's output tile. instructions: of a warp; the others: of an SM."""

    instructions: float
    tensor_cycles: float
    issue_cycles: float
    weight_bytes: int
    token_bytes: int

    @property
    def cycles(self) -> float:
        return self.tensor_cycles + self.issue_cycles


def granule_of(config: Blocks) -> int:
    """Tokens of one MMA."""
    if isinstance(config, PersistentConfig):
        return 128
    return 64 if config.tokens == 128 else config.tokens


def step_of(config: Blocks, tiles: TileFormat) -> Step:
    """Count a configuration's step. Raises CompileError, UnsupportedError."""
    loops = innermost_loops(compile_build(config.build(tiles), WGMMA_ARCH))[config.function]
    loop = min((loop for loop in loops if loop[MMA]), key=lambda loop: loop.total())
    of_step = GROUP // MMA_K * config.tokens // granule_of(config)
    instructions = loop.total() / (loop[MMA] / of_step)
    warpgroups = config.rows // WARPGROUP_ROWS  # of a step; a scheduler has a warp of each
    tile_bytes = tiles.tile_bytes + 2 * MMA_ROWS
    return Step(
        instructions,
        warpgroups * GROUP / MMA_K * config.tokens * TOKEN_CYCLES,
        warpgroups * instructions,
        config.rows // MMA_ROWS * tile_bytes,
        config.tokens * (GROUP + 4 * tiles.a_grouped),
    )


def persistent(kernel: ImmaGemm, m: int) -> list[Blocks]:
    """Configurations for m tokens whose blocks are persistent, one an SM."""
    gemm = GemmWorkload(m, MANY_ROWS, GROUP)
    configs = kernel.choice.for_gemm(gemm, SMS, in_mma_order=True)
    clusters: list[Blocks] = [c for c in configs if isinstance(c, ClusterConfig)]
    large = [c for c in configs if isinstance(c, PersistentConfig) and c.tokens < 2 * m]
    return [*clusters, *large]


def report(
    kernel: ImmaGemm,
    tokens: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    gbps: float,
    mhz: float,
) -> None:
    steps = {m: {c: step_of(c, kernel.tiles) for c in persistent(kernel, m)} for m in tokens}
    _head(
        "M", "configuration", "instructions", "tensor + issue", "us", "fit", "KB weights + tokens"
    )
    for m, of_m in steps.items():
        for config, step in of_m.items():
            _say(
                str(m),
                _named(config),
                f"{step.instructions:.0f}",
                f"{step.tensor_cycles:.0f} + {step.issue_cycles:.0f}",
                f"{step.cycles / mhz:.2f}",
                f"{kernel.choice.costs[config].alone_us:.2f}",
                f"{step.weight_bytes / 1e3:.1f} + {step.token_bytes / 1e3:.1f}",
            )
    _head("M", "N x K", "configuration", "steps", "us of steps", "us of reading")
    for m, of_m in steps.items():
        for n, k in shapes:
            gemm = GemmWorkload(m, n, k)
            counts = {c: steps_of_a_block(c, gemm, kernel.tiles) for c in of_m}
            config = min(of_m, key=lambda c: counts[c] * of_m[c].cycles)
            read_us = gemm.weight_bytes(kernel.tiles.w_bits, GROUP) / gbps / 1e3
            _say(
                str(m),
                f"{n}x{k}",
                _named(config),
                f"{counts[config]:.1f}",
                f"{counts[config] * of_m[config].cycles / mhz:.1f}",
                f"{read_us:.1f}",
            )


def steps_of_a_block(config: Blocks, gemm: GemmWorkload, tiles: TileFormat) -> float:
    """Mean over the blocks of a launch."""
    steps = tiles.steps(gemm.k)
    outputs = -(-gemm.n // config.rows) * -(-gemm.m // config.tokens)
    return outputs * steps / config.shares(gemm.m, gemm.n, steps, SMS).blocks


def _named(config: Blocks) -> str:
    kind = "cluster" if isinstance(config, ClusterConfig) else "persistent"
    return f"{kind} {' '.join(str(value) for value in config.as_dict().values())}"


def _head(*cells: str) -> None:
    _say(*cells)
    _say(*("---" for _ in cells))


def _say(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = [shape.split("x") for shape in text.split(",")]
    return [(int(n), int(k)) for n, k in pairs]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="flexq-imma-w6a6")
    parser.add_argument("--m", default="64,128")
    parser.add_argument("--shapes", type=_shapes, default=SHAPES)
    parser.add_argument("--gbps", type=float, default=4200.0, help="of memory, read")
    parser.add_argument("--mhz", type=float, default=1755.0, help="clock of the SMs")
    given = parser.parse_args()
    kernel = resolve(given.kernel, "cuda")
    if not isinstance(kernel, ImmaGemm):
        raise SystemExit(f"{given.kernel} is not on int8 tensor cores: name another kernel")
    report(kernel, parse_ranges(given.m), given.shapes, given.gbps, given.mhz)
