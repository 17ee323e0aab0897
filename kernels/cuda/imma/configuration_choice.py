"""Choice of a configuration of csrc/imma/group_gemm*.cu.

1. `Candidates.for_tokens` lists what may run m tokens, by their number and order (limits below).
   `ImmaGemm.fitting` leaves out what the GPU cannot run. The tuner times the rest.
2. `choose` takes one of them where nothing was timed:
   - few tokens: the least loss, interpolated between timed shapes (kernels/cuda/timed_shapes.py);
   - else the least time that `cost_us` estimates: waves of blocks times their steps of K.

The numbers are data: candidates.toml has the candidates with their costs, timed_shapes/*.json the
losses. `python benchmarks/kernels/heuristic.py` measures, fits, writes the tables, and reports what
the choice loses.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kernels.cuda.imma.configurations import (
    GROUP,
    MMA_ROWS,
    MMA_TOKENS,
    SIX_BITS,
    AnyImmaConfig,
    ClusterConfig,
    ImmaConfig,
    PersistentConfig,
    TiledConfig,
    TileFormat,
    WgmmaConfig,
)
from kernels.cuda.timed_shapes import TimedShapes, choose_by_timed_shapes
from workloads.gemm import GemmWorkload

# Limits in tokens, from the records of `heuristic.py measure` on an H200 (examples/h200):
MOST_FEW = 64  # from here on the kernel for few tokens never won
LEAST_MANY = 16  # up to here the tiled kernel never won
MOST_NATURAL = 32  # more tokens have the order of warpgroup MMA, where there is one
# FlexQ's have it from 17 tokens on where K is this long: at 32 tokens group_gemm_cluster.cu was
# 1.0 to 1.23 times as fast as the kernels for the natural order on eight of twelve shapes, but 0.75
# to 0.92 times on the four smallest (examples/h200/stream-k-times.json.gz).
LEAST_LONG_K = 4096

_REGISTERS = 65536  # of an SM
_SM_SHARED_BYTES, _BLOCK_SHARED_BYTES = 227 * 1024, 1024  # usable; reserved for each block
_BYTES_A_CODE = (1536 + 32) / 2048  # of 6-bit weights with their scales
_READ_BYTES_US = 4.6e6  # of an H200's memory: docs/kernels/README.md

# Of the places for blocks, which clusters of more than two fill: a GPC's SMs are no multiple of
# most sizes. On an H200 grids of 85 % of them ran at once, none of 91 % and more did.
_CLUSTERED_SHARE = 0.88
# Clusters that fill a wave in part are not spread evenly: as many blocks are on the busiest SM as
# if this share of the SMs had all of them. From the times of dgq-w4a8 on an H100 and an H200.
_SPREAD_SHARE = 0.7

ManyConfig = TiledConfig | WgmmaConfig | ClusterConfig | PersistentConfig
_KINDS: dict[str, type[ManyConfig]] = {
    "tiled": TiledConfig,
    "wgmma": WgmmaConfig,
    "cluster": ClusterConfig,
    "persistent": PersistentConfig,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds: start_us of a launch; a step of K takes alone_us, or each_us times the blocks
    that share an SM, whichever is more. registers: of a thread. each_wave: every wave of blocks
    takes start_us, since it begins when the last one has ended; else the launch alone does."""

    start_us: float
    alone_us: float
    each_us: float
    registers: int
    each_wave: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """The configurations of one kernel, and what chooses among them.

    few: by column tiles, for up to MOST_FEW tokens. costs: of all others, in the order of
    candidates. timed: losses of those for few tokens. many_rows: row tiles an SM; from here on, 17
    to 32 tokens are faster in the tiled kernel. long_k: with so many k, tokens have the order of
    warpgroup MMA from 17 on.
    """

    few: Mapping[int, Sequence[ImmaConfig]]
    costs: Mapping[ManyConfig, Cost]
    timed: TimedShapes
    many_rows: float = 6.0
    long_k: float = math.inf

    def in_mma_order(self, m: int, k: int) -> bool:
        """Return True if m tokens of K = k are in warpgroup MMA order, on GPUs that support it."""
        return m > MOST_NATURAL or (m > LEAST_MANY and k >= self.long_k)

    def for_tokens(self, m: int, *, in_mma_order: bool) -> list[AnyImmaConfig]:
        """Every configuration for m tokens of this order, whatever the GPU."""
        if in_mma_order:
            return [*self._of(WgmmaConfig), *self._clusters(m), *self._of(PersistentConfig)]
        few = self.for_few(m) if m <= MOST_FEW else []
        many = self._of(TiledConfig) if m > LEAST_MANY else []
        return [*few, *many]

    def for_few(self, m: int) -> list[ImmaConfig]:
        """Every configuration of the kernel for few tokens for m of them."""
        tiles = next((tiles for tiles in self.few if m <= tiles * MMA_TOKENS), max(self.few))
        return [*self.few[tiles]]

    def every(self) -> list[AnyImmaConfig]:
        """Every configuration for every number of tokens."""
        return [*(config for configs in self.few.values() for config in configs), *self.costs]

    def _clusters(self, m: int) -> list[ManyConfig]:
        """Those whose blocks have room for m tokens, and least to spare."""
        roomy = [c for c in self.costs if isinstance(c, ClusterConfig) and c.tokens >= m]
        least = min((c.tokens for c in roomy), default=0)
        return [c for c in roomy if c.tokens == least]

    def _of(self, kind: type[ManyConfig]) -> list[ManyConfig]:
        return [config for config in self.costs if isinstance(config, kind)]


def bucket_of(m: int) -> int:
    """Tokens that m are rounded up to, and that have the same configurations: a power of two, or 48
    or 96, for which group_gemm_cluster.cu has tiles."""
    most = 1 << (m - 1).bit_length()
    between = most // 4 * 3
    return between if between in (48, 96) and m <= between else most


def choose(
    configs: Sequence[AnyImmaConfig],
    gemm: GemmWorkload,
    sms: int,
    candidates: Candidates,
    tiles: TileFormat = SIX_BITS,
    *,
    unseen: bool = False,
) -> AnyImmaConfig:
    """The configuration to run of those that a GPU of so many SMs can run.

    unseen: as of Interpolation.expected.
    """

    def estimated_us(config: ManyConfig) -> float:
        cost = candidates.costs[config]
        return cost_us(cost, waves_of(config, cost, gemm, sms, tiles), gemm)

    few = [c for c in configs if isinstance(c, ImmaConfig)]
    many = [c for c in configs if not isinstance(c, ImmaConfig)]
    rows_an_sm = gemm.n / MMA_ROWS / sms
    if few and (not many or (gemm.m <= MOST_NATURAL and rows_an_sm <= candidates.many_rows)):
        return choose_by_timed_shapes(few, gemm, sms, candidates.timed, unseen=unseen)
    return min(many, key=estimated_us)


@dataclass(frozen=True, slots=True)
class Waves:
    """Blocks of a grid as they follow each other: whole waves of `resident` blocks an SM, then one
    of `last` on the busiest SM; 0: none. steps: of K that a block's busiest warp takes,
    and what takes it as long as so many. starts: of waves that begin when the last one has ended,
    because a block's ring fills an SM, or of the launch alone."""

    whole: int
    resident: int
    last: int
    steps: float
    starts: int = 1


def waves_of(
    config: ManyConfig, cost: Cost, gemm: GemmWorkload, sms: int, tiles: TileFormat
) -> Waves:
    """The waves of a configuration's blocks on a GPU."""
    if isinstance(config, PersistentConfig) or (
        isinstance(config, ClusterConfig) and config.stream_k
    ):
        shares = config.shares(gemm.m, gemm.n, tiles.steps(gemm.k), sms)
        return Waves(0, 1, 1, shares.longest)
    x, y, _ = config.grid(gemm.m, gemm.n)
    registers = -(-cost.registers // 8) * 8
    by_registers = _REGISTERS // (config.threads * registers)
    by_shared = _SM_SHARED_BYTES // (config.shared_bytes(tiles) + _BLOCK_SHARED_BYTES)
    resident = max(1, min(by_registers, by_shared))
    steps = math.ceil(gemm.k / (GROUP * config.k_split))
    is_cluster = isinstance(config, ClusterConfig)
    if is_cluster or cost.each_wave:
        share = _CLUSTERED_SHARE if config.k_split > 2 else 1.0
        whole, rest = divmod(x * y, int(sms * resident * share))
        is_spread = is_cluster or config.k_split == 1 or rest <= sms
        last = math.ceil(rest / sms / (1.0 if is_spread else _SPREAD_SHARE))
        return Waves(whole, resident, min(resident, last), steps, whole + (rest > 0))
    whole, rest = divmod(x * y, sms * resident)
    return Waves(whole, resident, -(-rest // sms), steps)


def read_us(gemm: GemmWorkload) -> float:
    """Time to read 6-bit weights at an H200's bandwidth."""
    return gemm.n * gemm.k * _BYTES_A_CODE / _READ_BYTES_US


def cost_us(cost: Cost, waves: Waves, gemm: GemmWorkload) -> float:
    """Waves of blocks, each as long as the busiest SM's; never less than reading the weights."""

    def wave_us(on_an_sm: int) -> float:
        return waves.steps * max(cost.alone_us, cost.each_us * on_an_sm)

    busy_us = waves.starts * cost.start_us + waves.whole * wave_us(waves.resident)
    if waves.last:
        busy_us += wave_us(waves.last)
    return float((busy_us**4 + read_us(gemm) ** 4) ** 0.25)


def _read_candidates() -> Mapping[str, Any]:
    text = (resources.files("kernels") / "cuda" / "imma" / "candidates.toml").read_text()
    return tomllib.loads(text)


_DATA = _read_candidates()


def _few(weights: str) -> dict[int, tuple[ImmaConfig, ...]]:
    columns = _DATA["columns"]["few_tokens"]
    return {
        int(tiles): tuple(
            ImmaConfig(col_tiles=int(tiles), **dict(zip(columns, row, strict=True))) for row in rows
        )
        for tiles, rows in _DATA["few_tokens"][weights].items()
    }


def _costs(kernel: str, *, each_wave: frozenset[str] = frozenset()) -> dict[ManyConfig, Cost]:
    """each_wave: kinds of configurations of which every wave takes start_us."""
    costs: dict[ManyConfig, Cost] = {}
    for name, rows in _DATA["many_tokens"][kernel].items():
        columns = _DATA["columns"][name]
        for row in rows:
            settings = dict(zip(columns, row[: len(columns)], strict=True))
            cost = dict(zip(_DATA["columns"]["cost"], row[len(columns) :], strict=True))
            costs[_KINDS[name](**settings)] = Cost(**cost, each_wave=name in each_wave)
    return costs


_EACH_WAVE = frozenset({"wgmma"})
FLEXQ = Candidates(
    _few("six_bits"), _costs("flexq"), TimedShapes("imma", "flexq"), long_k=LEAST_LONG_K
)
_NIBBLES = TimedShapes("imma", "nibbles")  # 4-bit weights whose groups are scaled one by one
ATOM = Candidates(_few("four_bits"), _costs("atom"), _NIBBLES)
GROUP_SCALED = Candidates(_few("four_bits"), _costs("group", each_wave=_EACH_WAVE), _NIBBLES)
# Few tokens: losses of flexq-imma's, which reads as many bytes.
TWO_LEVEL = Candidates(_few("six_bits"), _costs("dual"), FLEXQ.timed)
DUAL_GRAINED = Candidates(
    _few("four_bits"),
    _costs("dgq", each_wave=_EACH_WAVE),
    TimedShapes("imma", "dual-grained"),
    many_rows=10.0,
)
