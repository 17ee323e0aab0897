"""Choice of a configuration of csrc/imma/group_gemm*.cu.

With tuning, kernels/autotune.py times what `ImmaGemm.candidates` returns: `Candidates.for_gemm`
lists the configurations for a GEMM, and ImmaGemm drops those that the GPU can't run. Without, the
kernel's `default_config` calls `Candidates.choose`, which selects one of the same list by timed
cases (kernels/cuda/timed_choice.py), for many tokens relative to an estimated cost. candidates.toml
has the candidates with their costs.
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
    GROUP,
    MANY_KINDS,
    MMA_ROWS,
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
    operand_bytes,
)
from flexq_bench.kernels.cuda.timed_choice import Place, TimedChoice
from flexq_bench.kernels.runtime.gpu import Device
from flexq_bench.workloads.gemm import GemmWorkload

# Limits in tokens, from the records of `heuristic.py measure` on an H200 (examples/h200):
MAX_FEW = 64  # for more tokens the kernel for few tokens was never the fastest
MAX_UNTILED = 16  # up to here the tiled kernel was never the fastest
MAX_NATURAL = 32  # more tokens are in warpgroup MMA order, on GPUs that support it
# From this K on, FlexQ has two other limits. At 24 tokens its kernel for few tokens, with three
# column tiles, was 1.02 to 1.13 times as fast as group_gemm_cluster.cu on twelve layers. At 32 the
# latter was 1.0 to 1.23 times as fast as the kernels for the natural order on eight of twelve
# shapes, and 0.75 to 0.92 times on those with the smallest K (imma- and stream-k-times.json.gz).
MIN_LONG_K = 4096
MAX_LONG_UNTILED = 24  # instead of both MAX_UNTILED and MAX_NATURAL
LONG_COL_TILES = 3
_REGISTERS = 65536  # of an SM
_SM_SHARED_BYTES, _BLOCK_SHARED_BYTES = 227 * 1024, 1024  # usable; reserved for each block
_READ_FRACTION = 0.935  # of the peak bandwidth that a read reaches: docs/kernels/README.md


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimated time of a configuration, in microseconds, and its registers per thread.

    A step of K takes max(alone_us, each_us · blocks on the SM). start_us: per wave of blocks,
    because one begins when the previous one has ended.
    """

    start_us: float
    alone_us: float
    each_us: float
    registers: int


@dataclass(frozen=True, eq=False)
class Candidates:
    """Configurations of one kernel, and the data by which `choose` selects one.

    few: by column tiles, for up to MAX_FEW tokens. costs: of all others, in the order of
    candidates. timed: cases of both, of TiledConfig up to MAX_NATURAL tokens. long_k: K from which
    on MAX_LONG_UNTILED holds, and LONG_COL_TILES are candidates.
    """

    few: Mapping[int, Sequence[ImmaConfig]]
    costs: Mapping[ManyConfig, Cost]
    timed: TimedChoice
    tiles: TileFormat
    long_k: float = math.inf

    def in_mma_order(self, m: int, k: int) -> bool:
        """Return True if m tokens of K = k are in warpgroup MMA order, on GPUs that support it."""
        return m > (MAX_LONG_UNTILED if k >= self.long_k else MAX_NATURAL)

    def for_gemm(self, gemm: GemmWorkload, sms: int, *, in_mma_order: bool) -> list[AnyImmaConfig]:
        """Return all configurations for the largest number of tokens of a GEMM's bucket."""
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

    def choose(
        self, configs: Sequence[AnyImmaConfig], gemm: GemmWorkload, device: Device
    ) -> AnyImmaConfig:
        """Return the configuration to run without tuning. configs: those that the GPU can run."""
        few = [c for c in configs if isinstance(c, ImmaConfig)]
        many = [c for c in configs if not isinstance(c, ImmaConfig)]
        if few and (not many or gemm.m <= MAX_NATURAL):
            in_table = [c for c in configs if isinstance(c, ImmaConfig | TiledConfig)]
            return self.timed.choose_few(in_table, gemm, device, few[0].col_tiles)
        return self.timed.choose(many, gemm, device, self.place_for_many)

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

    def place_for_many(self, config: ManyConfig, gemm: GemmWorkload, device: Device) -> Place:
        """Return the cost of a configuration at a case, and its coordinates there.

        The cost is a smooth maximum of computing waves of blocks, each as long as on the busiest
        SM, and of reading weights.
        """
        cost, sms, steps = self.costs[config], device.sms, self.tiles.steps(gemm.k)
        token_tiles = -(-gemm.m // config.tokens)
        added, is_aligned = 0, True
        if isinstance(config, PersistentConfig | ClusterConfig):
            shares = config.shares(gemm.m, gemm.n, steps, sms)
            if shares.shared:
                added = -(-steps // shares.each)
                is_whole = 0 in (shares.each % steps, steps % shares.each)
                is_aligned = is_whole and not shares.longer
            sharers = config.sharers if isinstance(config, PersistentConfig) else 1
            cluster = config.cluster if isinstance(config, PersistentConfig) else config.k_split
            outputs, at_once = -(-gemm.n // (config.rows * sharers)) * token_tiles, sms / cluster
            block_steps, waves = shares.longest, [1]  # waves: blocks on the busiest SM
        else:
            x, y, _ = config.grid(gemm.m, gemm.n)
            registers = config.threads * -(-cost.registers // 8) * 8
            shared = config.shared_bytes(self.tiles) + _BLOCK_SHARED_BYTES
            resident = max(1, min(_REGISTERS // registers, _SM_SHARED_BYTES // shared))
            outputs, at_once = x * y, sms * resident
            block_steps = math.ceil(gemm.k / (GROUP * config.k_split))
            whole, rest = divmod(outputs, at_once)
            waves = [*[resident] * whole, *([-(-rest // sms)] if rest else [])]
        step_us = sum(max(cost.alone_us, cost.each_us * blocks) for blocks in waves)
        read_us = operand_bytes(gemm.n, gemm.k) / (_READ_FRACTION * device.memory_gbps * 1e3)
        us = ((len(waves) * cost.start_us + block_steps * step_us) ** 4 + read_us**4) ** 0.25
        each = outputs / at_once
        return Place(
            math.log(us),
            (
                math.log(gemm.m) / 6,
                math.log(gemm.n / MMA_ROWS / sms) / 2,
                math.log(gemm.k / GROUP) / 10,
                math.log(each) / 10,
                math.log(math.ceil(each) / each) / 0.85,  # the imbalance of output tiles
                math.log(block_steps) / 9,
                math.log1p(added) / 16,  # blocks whose partial sums are added
                is_aligned / 10,
                math.log(us) / 6,
                math.log(read_us / us) / 3.5,
                math.log(gemm.m / (token_tiles * config.tokens))
                / 5,  # how full tiles of tokens are
            ),
        )


def bucket_of(m: int) -> int:
    """Round m up to a number of tokens with the same configurations.

    It is a power of two, or 24, 48 or 96, for which there are tiles of their own.
    """
    power = 1 << (m - 1).bit_length()
    smaller = power // 4 * 3
    return smaller if smaller in (24, 48, 96) and m <= smaller else power


_DATA: Mapping[str, Any] = tomllib.loads(
    (resources.files("flexq_bench.kernels.cuda.imma") / "candidates.toml").read_text()
)


def _candidates(
    name: str, tiles: TileFormat, like: TimedChoice | None = None, long_k: float = math.inf
) -> Candidates:
    """Read the candidates of a kernel. like: as of TimedChoice. long_k: as of Candidates."""
    columns = _DATA["columns"]
    few = {
        int(col_tiles): tuple(
            ImmaConfig(
                col_tiles=int(col_tiles), **dict(zip(columns["few_tokens"], row, strict=True))
            )
            for row in rows
        )
        for col_tiles, rows in _DATA["few_tokens"][f"{tiles.w_bits}_bits"].items()
    }
    costs = {}
    for kind, rows in _DATA["many_tokens"][name].items():
        for row in rows:
            settings = dict(zip(columns[kind], row, strict=False))
            cost = dict(zip(columns["cost"], row[len(settings) :], strict=True))
            costs[MANY_KINDS[kind](**settings)] = Cost(**cost)
    return Candidates(few, costs, TimedChoice(name, like), tiles, long_k)


FLEXQ = _candidates("flexq", SIX_BITS, long_k=MIN_LONG_K)
ATOM = _candidates("atom", TileFormat(4, int8_tail=True))
DUAL_GRAINED = _candidates("dgq", TileFormat(4, dual_grained=True, a_grouped=False))
GROUP_SCALED = _candidates("group", TileFormat(4, a_grouped=False), DUAL_GRAINED.timed)
TWO_LEVEL = _candidates("dual", TileFormat(6, dual_grained=True, a_grouped=False), FLEXQ.timed)
