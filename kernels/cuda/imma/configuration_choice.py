"""Choice of a configuration of csrc/imma/group_gemm*.cu.

With tuning, kernels/autotune.py times what `ImmaGemm.candidates` returns: `Candidates.for_gemm`
lists the configurations for a GEMM, and ImmaGemm drops those that the GPU can't run. Without, the
kernel's `default_config` calls `choose_untuned`, which selects one of the same list
by timed cases (kernels/cuda/timed_choice.py), for many tokens also by the model of cost_model.py.
candidates.toml has the candidates with their costs.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from flexq_bench.kernels.cuda.imma.configurations import (
    CHUNK,
    MANY_KINDS,
    MMA_TOKENS,
    SIX_BITS,
    AnyImmaConfig,
    ClusterConfig,
    ImmaConfig,
    ManyConfig,
    PersistentConfig,
    TiledConfig,
    TileFormat,
    WgmmaConfig,
)
from flexq_bench.kernels.cuda.imma.cost_model import Cost, place_of
from flexq_bench.kernels.cuda.timed_choice import Place, TimedChoice, choose_for_few_tokens
from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

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


@dataclass(frozen=True, eq=False)
class Candidates:
    """Configurations of one kernel, and the data by which `choose_untuned` selects one.

    few: by column tiles, for up to MAX_FEW tokens. costs: of all others, in the order of
    candidates. timed: cases of both, of TiledConfig up to MAX_NATURAL tokens. long_k: K from which
    on MAX_LONG_UNTILED holds, and LONG_COL_TILES are candidates.
    """

    few: Mapping[int, Sequence[ImmaConfig]]
    costs: Mapping[ManyConfig, Cost]
    timed: TimedChoice
    tiles: TileFormat
    long_k: float = math.inf

    def place_for_many(self, config: ManyConfig, gemm: GemmWorkload, device: Device) -> Place:
        """Return the place of a configuration of `costs` (timed_choice.py)."""
        return place_of(config, self.costs[config], gemm, device, self.tiles)

    def in_mma_order(self, m: int, k: int) -> bool:
        """Return True if m tokens of K = k are in warpgroup MMA order, on GPUs that support it."""
        return m > (MAX_LONG_UNTILED if k >= self.long_k else MAX_NATURAL)

    def for_gemm(self, gemm: GemmWorkload, sms: int, *, in_mma_order: bool) -> list[AnyImmaConfig]:
        """Return all configurations for a GEMM with tokens in this order, for a GPU with `sms` SMs.

        They are those for the largest number of tokens of its bucket.
        """
        m, k = bucket_of(gemm.m), gemm.k
        if in_mma_order:
            clusters = self._clusters(m, gemm.n, sms)
            return [*self._of(WgmmaConfig), *clusters, *self._of(PersistentConfig)]
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

    def _clusters(self, m: int, n: int, sms: int) -> list[ManyConfig]:
        """Return the cluster configurations with the smallest tile of at least m tokens.

        And those with the next tile, if the smallest one is an odd number of chunks: where many
        blocks add partial sums, the block with more chunks is late. At 48 tokens the tile of 64 was
        1.15 to 1.33 times as fast on two of ten shapes (640x18688 and 1536x5504, H100). With more
        tokens than a tile has: those for few output tiles with the largest one.
        """
        clusters = [c for c in self.costs if isinstance(c, ClusterConfig)]
        tiles = sorted({c.tokens for c in clusters})
        fitting = [tile for tile in tiles if tile >= m]
        used = fitting[:2] if fitting and fitting[0] // CHUNK % 2 else fitting[:1] or tiles[-1:]
        return [
            c
            for c in clusters
            if c.tokens in used
            and (c.outputs(m, n) * c.k_split <= sms if c.for_few_outputs else bool(fitting))
        ]

    def _of(self, kind: type[ManyConfig]) -> list[ManyConfig]:
        return [config for config in self.costs if isinstance(config, kind)]


def bucket_of(m: int) -> int:
    """Round m up to a number of tokens with the same configurations.

    It is a power of two, or 24, 48 or 96, for which there are tiles of their own.
    """
    power = 1 << (m - 1).bit_length()
    smaller = power // 4 * 3
    return smaller if smaller in (24, 48, 96) and m <= smaller else power


def choose_untuned(
    configs: Sequence[AnyImmaConfig],
    gemm: GemmWorkload,
    device: Device,
    candidates: Candidates,
    *,
    unseen: bool = False,
) -> AnyImmaConfig:
    """Return the configuration to run. configs: those that the GPU can run. unseen: as of
    TimedChoice.choose.
    """
    few = [c for c in configs if isinstance(c, ImmaConfig)]
    many = [c for c in configs if not isinstance(c, ImmaConfig)]
    if few and (not many or gemm.m <= MAX_NATURAL):
        tiled = (c for c in many if isinstance(c, TiledConfig))
        of_table: list[ImmaConfig | TiledConfig] = [*few, *tiled]
        return choose_for_few_tokens(candidates.timed, of_table, gemm, device, unseen=unseen)
    place = candidates.place_for_many
    return candidates.timed.choose(many, gemm, device, place, unseen=unseen)


_FOLDER = resources.files("flexq_bench.kernels.cuda.imma")
_DATA: Mapping[str, Any] = tomllib.loads((_FOLDER / "candidates.toml").read_text())


def _few(weights: str) -> dict[int, tuple[ImmaConfig, ...]]:
    columns = _DATA["columns"]["few_tokens"]
    return {
        int(tiles): tuple(
            ImmaConfig(col_tiles=int(tiles), **dict(zip(columns, row, strict=True))) for row in rows
        )
        for tiles, rows in _DATA["few_tokens"][weights].items()
    }


def _many(kernel: str, *, each_wave: frozenset[str] = frozenset()) -> dict[ManyConfig, Cost]:
    """Read the costs of a kernel's configurations. each_wave: kinds with start_us per wave."""
    costs: dict[ManyConfig, Cost] = {}
    for name, rows in _DATA["many_tokens"][kernel].items():
        columns = _DATA["columns"][name]
        for row in rows:
            settings = dict(zip(columns, row[: len(columns)], strict=True))
            cost = dict(zip(_DATA["columns"]["cost"], row[len(columns) :], strict=True))
            costs[MANY_KINDS[name](**settings)] = Cost(**cost, each_wave=name in each_wave)
    return costs


_EACH_WAVE = frozenset({"wgmma"})
_FLEXQ, _DGQ = TimedChoice("flexq"), TimedChoice("dgq")
FLEXQ = Candidates(_few("six_bits"), _many("flexq"), _FLEXQ, SIX_BITS, long_k=MIN_LONG_K)
ATOM = Candidates(
    _few("four_bits"), _many("atom"), TimedChoice("atom"), TileFormat(4, int8_tail=True)
)
GROUP_SCALED = Candidates(
    _few("four_bits"),
    _many("group", each_wave=_EACH_WAVE),
    TimedChoice("group", like=_DGQ),
    TileFormat(4, a_grouped=False),
)
TWO_LEVEL = Candidates(
    _few("six_bits"),
    _many("dual"),
    TimedChoice("dual", like=_FLEXQ),
    TileFormat(6, dual_grained=True, a_grouped=False),
)
DUAL_GRAINED = Candidates(
    _few("four_bits"),
    _many("dgq", each_wave=_EACH_WAVE),
    _DGQ,
    TileFormat(4, dual_grained=True, a_grouped=False),
)
