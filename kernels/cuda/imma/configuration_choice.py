"""Choice of a configuration of csrc/imma/group_gemm*.cu.

1. `Candidates.for_tokens` lists the candidates for m tokens and an order of k (limits below).
   `ImmaGemm.fitting` drops those that the GPU cannot run. The tuner times the others.
2. Without tuning, `choose` selects one of them:
   - few tokens: the least loss, interpolated between timed shapes (kernels/cuda/timed_shapes.py);
   - else the least time that `cost_us` estimates: waves of blocks times their steps of K.

The numbers are data: candidates.toml has the candidates with their costs, timed_shapes/*.json the
losses. `python benchmarks/kernels/heuristic.py` measures, fits, writes the tables, and reports the
loss of the choice.
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
MAX_FEW = 64  # for more tokens the kernel for few tokens was never the fastest
MAX_UNTILED = 16  # up to here the tiled kernel was never the fastest
MAX_NATURAL = 32  # more tokens are in warpgroup MMA order, on GPUs that support it
# From this K on, FlexQ has two other limits. At 24 tokens its kernel for few tokens, with three
# column tiles, was 1.02 to 1.13 times as fast as group_gemm_cluster.cu on twelve layers
# (imma-times.json.gz). At 32 tokens group_gemm_cluster.cu was 1.0 to 1.23 times as fast as the
# kernels for the natural order on eight of twelve shapes, but 0.75 to 0.92 times on the four with
# the smallest K (stream-k-times.json.gz).
MIN_LONG_K = 4096
MAX_LONG_UNTILED = 24  # instead of both MAX_UNTILED and MAX_NATURAL
LONG_COL_TILES = 3

_REGISTERS = 65536  # of an SM
_SM_SHARED_BYTES, _BLOCK_SHARED_BYTES = 227 * 1024, 1024  # usable; reserved for each block
_BYTES_PER_WEIGHT = (1536 + 32) / 2048  # 6-bit weights with their scales
_READ_BYTES_US = 4.6e6  # of an H200's memory: docs/kernels/README.md

# Fraction of the resident blocks that clusters of more than two blocks reach: the SMs of a GPC are
# not a multiple of most cluster sizes. On an H200 grids of 85 % of the resident blocks ran in one
# wave, none of 91 % and more did.
_CLUSTER_FRACTION = 0.88
# Clusters of a partial wave are spread unevenly: the busiest SM has as many blocks as if they were
# on this fraction of the SMs. From the times of dgq-w4a8 on an H100 and an H200.
_SPREAD_FRACTION = 0.7
# The costs of the warpgroup kernel without clusters are fitted to more tokens than clusters have:
# beside clusters its times are estimated too low. Without this factor the choice loses 4.4 and 3.3
# instead of 2.5 and 1.8 % at 64 and 128 tokens on an H100 (imma-times.json.gz).
_BESIDE_CLUSTERS = 1.08

ManyConfig = TiledConfig | WgmmaConfig | ClusterConfig | PersistentConfig
_KINDS: dict[str, type[ManyConfig]] = {
    "tiled": TiledConfig,
    "wgmma": WgmmaConfig,
    "cluster": ClusterConfig,
    "persistent": PersistentConfig,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimated time of a configuration, in microseconds, and its registers per thread.

    A step of K takes max(alone_us, each_us · blocks on the SM). start_us: per launch, or with
    each_wave per wave of blocks, because a wave begins when the previous one has ended.
    """

    start_us: float
    alone_us: float
    each_us: float
    registers: int
    each_wave: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """Configurations of one kernel, and the data by which `choose` selects one.

    few: by column tiles, for up to MAX_FEW tokens. costs: of all others, in the order of
    candidates. timed: losses of those for few tokens. many_rows: row tiles per SM from which on
    17 to 32 tokens are faster in the tiled kernel. long_k: K from which on MAX_LONG_UNTILED holds,
    and LONG_COL_TILES are candidates.
    """

    few: Mapping[int, Sequence[ImmaConfig]]
    costs: Mapping[ManyConfig, Cost]
    timed: TimedShapes
    many_rows: float = 6.0
    long_k: float = math.inf

    def in_mma_order(self, m: int, k: int) -> bool:
        """Return True if m tokens of K = k are in warpgroup MMA order, on GPUs that support it."""
        return m > (MAX_LONG_UNTILED if k >= self.long_k else MAX_NATURAL)

    def for_tokens(self, m: int, k: int, *, in_mma_order: bool) -> list[AnyImmaConfig]:
        """Return all configurations for m tokens of K = k in this order, for any GPU."""
        if in_mma_order:
            return [*self._of(WgmmaConfig), *self._clusters(m), *self._of(PersistentConfig)]
        few = self.for_few(m, k) if m <= MAX_FEW else []
        max_untiled = MAX_LONG_UNTILED if k >= self.long_k else MAX_UNTILED
        many = self._of(TiledConfig) if m > max_untiled else []
        return [*few, *many]

    def for_few(self, m: int, k: int) -> list[ImmaConfig]:
        """Return all configurations of the kernel for few tokens, for m tokens of K = k."""
        numbers = [tiles for tiles in self.few if tiles != LONG_COL_TILES or k >= self.long_k]
        tiles = next((tiles for tiles in numbers if m <= tiles * MMA_TOKENS), max(numbers))
        return [*self.few[tiles]]

    def every(self) -> list[AnyImmaConfig]:
        """Return all configurations for all numbers of tokens."""
        return [*(config for configs in self.few.values() for config in configs), *self.costs]

    def _clusters(self, m: int) -> list[ManyConfig]:
        """Return the cluster configurations with the smallest tile of at least m tokens."""
        configs = [c for c in self.costs if isinstance(c, ClusterConfig) and c.tokens >= m]
        smallest = min((c.tokens for c in configs), default=0)
        return [c for c in configs if c.tokens == smallest]

    def _of(self, kind: type[ManyConfig]) -> list[ManyConfig]:
        return [config for config in self.costs if isinstance(config, kind)]


def bucket_of(m: int) -> int:
    """Round m up to a number of tokens with the same configurations.

    It is a power of two, or 24, 48 or 96, for which there are tiles of their own.
    """
    power = 1 << (m - 1).bit_length()
    smaller = power // 4 * 3
    return smaller if smaller in (24, 48, 96) and m <= smaller else power


def choose(
    configs: Sequence[AnyImmaConfig],
    gemm: GemmWorkload,
    sms: int,
    candidates: Candidates,
    tiles: TileFormat = SIX_BITS,
    *,
    unseen: bool = False,
) -> AnyImmaConfig:
    """Return the configuration to run. configs: those that a GPU with `sms` SMs can run.

    unseen: as in Interpolation.expected.
    """
    few = [c for c in configs if isinstance(c, ImmaConfig)]
    many = [c for c in configs if not isinstance(c, ImmaConfig)]
    has_clusters = any(isinstance(c, ClusterConfig) and c.stream_k for c in many)

    def estimated_us(config: ManyConfig) -> float:
        cost = candidates.costs[config]
        us = cost_us(cost, waves_of(config, cost, gemm, sms, tiles), gemm)
        return us * _BESIDE_CLUSTERS if has_clusters and isinstance(config, WgmmaConfig) else us

    tiles_per_sm = gemm.n / MMA_ROWS / sms
    if few and (not many or (gemm.m <= MAX_NATURAL and tiles_per_sm <= candidates.many_rows)):
        return choose_by_timed_shapes(few, gemm, sms, candidates.timed, unseen=unseen)
    return min(many, key=estimated_us)


@dataclass(frozen=True, slots=True)
class Waves:
    """Waves of blocks of a grid.

    whole: number of full waves, of `resident` blocks per SM. last: blocks of the partial wave on
    the busiest SM; 0: none. steps: steps of K of a block's busiest warp, epilogues included as
    steps. starts: waves that begin only when the previous one has ended, because the ring buffer of
    a block fills an SM, or 1 for the launch.
    """

    whole: int
    resident: int
    last: int
    steps: float
    starts: int = 1


def waves_of(
    config: ManyConfig, cost: Cost, gemm: GemmWorkload, sms: int, tiles: TileFormat
) -> Waves:
    """Return the waves of a configuration's blocks on a GPU with `sms` SMs."""
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
        fraction = _CLUSTER_FRACTION if config.k_split > 2 else 1.0
        whole, rest = divmod(x * y, int(sms * resident * fraction))
        is_spread = is_cluster or config.k_split == 1 or rest <= sms
        last = math.ceil(rest / sms / (1.0 if is_spread else _SPREAD_FRACTION))
        return Waves(whole, resident, min(resident, last), steps, whole + (rest > 0))
    whole, rest = divmod(x * y, sms * resident)
    return Waves(whole, resident, -(-rest // sms), steps)


def read_us(gemm: GemmWorkload) -> float:
    """Return the time to read 6-bit weights at the bandwidth of an H200, in microseconds."""
    return gemm.n * gemm.k * _BYTES_PER_WEIGHT / _READ_BYTES_US


def cost_us(cost: Cost, waves: Waves, gemm: GemmWorkload) -> float:
    """Estimate the time of a launch: a smooth maximum of computing its waves and reading weights.

    A wave takes as long as on the busiest SM.
    """

    def wave_us(blocks_per_sm: int) -> float:
        return waves.steps * max(cost.alone_us, cost.each_us * blocks_per_sm)

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
    """Read the costs of a kernel. each_wave: kinds of configurations with start_us per wave."""
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
    _few("six_bits"), _costs("flexq"), TimedShapes("imma", "flexq"), long_k=MIN_LONG_K
)
_NIBBLES = TimedShapes("imma", "nibbles")  # 4-bit weights whose groups are scaled one by one
ATOM = Candidates(_few("four_bits"), _costs("atom"), _NIBBLES)
GROUP_SCALED = Candidates(_few("four_bits"), _costs("group", each_wave=_EACH_WAVE), _NIBBLES)
TWO_LEVEL = Candidates(
    _few("six_bits"), _costs("dual"), TimedShapes("imma", "two-level", base="flexq")
)
DUAL_GRAINED = Candidates(
    _few("four_bits"),
    _costs("dgq", each_wave=_EACH_WAVE),
    TimedShapes("imma", "dual-grained"),
    many_rows=10.0,
)
