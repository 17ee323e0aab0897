"""Configurations of the int8 tensor-core kernels: how they are compiled and launched.

Five sources read the same packed weights: csrc/imma/group_gemm.cu for few tokens, where every warp
reads its own weights once, csrc/imma/group_gemm_tiled.cu for many, and on Hopper
csrc/imma/group_gemm_wgmma.cu, csrc/imma/group_gemm_cluster.cu (TMA, up to 128 tokens) and
csrc/imma/group_gemm_persistent.cu (TMA, warp-specialized).
configuration_choice.py chooses among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cache
from typing import ClassVar

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.runtime.nvrtc import Block, Build

GROUP = 128
MMA_ROWS, MMA_TOKENS = 16, 8
_SWIZZLE_BYTES = 1024  # csrc/imma/block_tile.cuh: 8 tokens; the size of a stage is a multiple
CHUNK = 16  # csrc/imma/warp_sums.cuh: tokens of a chunk, whose partial sums one warp reduces
_FRAGMENT_BYTES = 16 * 32  # a warp's sums of 16 rows and 8 tokens
WGMMA_ARCH = "sm_90"  # the only one with warpgroup MMA
MIN_STEPS = 4  # of K per persistent block; with fewer, its overhead outweighs its work
# Time of an epilogue and of adding another block's partial sums in a persistent block, in steps of
# K. From a regression of times of group_gemm_persistent.cu on an H200.
_OUTPUT_STEPS, _ADDED_STEPS = 2.5, 1.25
# The same for group_gemm_cluster.cu, by the number of warps (2: two or more) that
# first reduce within a cluster. From a regression of times like those in
# examples/h200/token-tiles-times.json.gz, but for the last, 1.5 there: where many blocks share a
# small output tile, the choice then lost 25 % (1152x3584, 64 tokens, H100).
_CLUSTER_OUTPUT_STEPS, _CLUSTER_ADDED_STEPS = {1: 1.5, 2: 2.5}, {1: 1.0, 2: 1.2}
# Share of the SMs that clusters of four or eight blocks fill, one block per SM: the driver's
# occupancy is 30 and 15 of them on an H100 and an H200 (tests/gpu/test_occupancy.py).
_SMS_OF_LARGE_CLUSTERS = 10 / 11
# Steps by which the estimate for an aligned division may be longer. Of 143 pairs of times of both
# on ten shapes, it was faster in 45 of 53 up to here, and in 6 of 43 from 8 steps on.
_ALIGNED_STEPS = 1.0
# Where operands exceed _IN_STEP_BYTES (four fifths of an H100's L2), output tiles are computed in
# step, so that blocks read the same weights and tokens at the same time, even if this takes up to
# _IN_STEP_LONGER times the steps of an even division, but not where shares of the tiles that are
# left over have less than _IN_STEP_SHARE steps. In 137 pairs of times on an H100 this was 1.09
# times as fast in the mean, and at most 1.03 times slower.
_IN_STEP_BYTES, _IN_STEP_LONGER, _IN_STEP_SHARE = 40e6, 1.05, 12
_BYTES_PER_WEIGHT = (1536 + 32) / 2048  # 6-bit weights with their scales


@dataclass(frozen=True, slots=True)
class TileFormat:
    """Format of a tile of weights, 16 rows by 128 k, as csrc/imma/layout.cuh defines it.

    int8_tail: the last group has 8-bit codes. dual_grained: integer scales and zero points of
    groups. a_grouped: activations have a scale per group, not one per token. int4_mma: use int4
    MMA even where it is emulated; False: only on GPUs with an int4 tensor core. w_exponent_bits: of
    floats with a scale per 32 k; 0: integers.
    """

    w_bits: int = 6
    int8_tail: bool = False
    dual_grained: bool = False
    a_grouped: bool = True
    int4_mma: bool = False
    w_exponent_bits: int = 0

    @property
    def tile_bytes(self) -> int:
        return MMA_ROWS * GROUP * self.w_bits // 8

    @property
    def scale_bytes(self) -> int:
        return MMA_ROWS * (4 if self.w_exponent_bits else 2)

    def steps(self, k: int) -> int:
        """Return the number of tiles along K."""
        return -(-k // GROUP) + self.int8_tail

    def defines(self) -> dict[str, int]:
        """Return the defines that differ from the defaults of csrc/imma/layout.cuh."""
        return {
            name.upper(): int(value)
            for name, value in asdict(self).items()
            if value != getattr(SIX_BITS, name)
        }


SIX_BITS = TileFormat()


@dataclass(frozen=True, slots=True)
class GroupGemmConfig(Config, ABC):
    """Base class of the configurations.

    source: in csrc. function: its name there, in stored profiles and in resource tables.
    """

    source: ClassVar[str]
    function: ClassVar[str]
    only_on_hopper: ClassVar[bool] = False

    @property
    @abstractmethod
    def threads(self) -> int:
        """Return the threads of a block."""

    @abstractmethod
    def shared_bytes(self, tiles: TileFormat) -> int:
        """Return the dynamic shared memory of a block in bytes."""

    def build(self, tiles: TileFormat) -> Build:
        """Return the build of `source` for this configuration."""
        return _build(self, tiles)


@dataclass(frozen=True, slots=True)
class ImmaConfig(GroupGemmConfig):
    """Configuration of csrc/imma/group_gemm.cu.

    row_tiles: of 16 rows per block; warps: of a block, which split K; stages: of each warp's ring
    buffer; k_split: blocks of a cluster that split K; late: 1 if the next kernel may start only
    after the last loads of weights; col_tiles: of 8 tokens per block; ahead: steps by which a warp
    loads activations early; early: 0 to 3, what a block does before it waits for the previous
    kernel; resident: blocks per SM that must have enough registers.
    """

    row_tiles: int
    warps: int
    stages: int
    k_split: int
    late: int
    col_tiles: int
    ahead: int = 1
    early: int = 0
    resident: int = 1

    source = "imma/group_gemm.cu"
    function = "flexq_imma"

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_bytes(self, tiles: TileFormat) -> int:
        reduction = self.warps * self.row_tiles * self.col_tiles * _FRAGMENT_BYTES
        return max(reduction, self.warps * self.stages * self.row_tiles * tiles.tile_bytes)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Return the grid: blocks along rows, k_split each, and blocks along tokens."""
        blocks = -(-n // (MMA_ROWS * self.row_tiles)) * self.k_split
        return blocks, -(-m // (self.col_tiles * MMA_TOKENS)), 1


@dataclass(frozen=True, slots=True)
class TiledConfig(GroupGemmConfig):
    """Configuration of csrc/imma/group_gemm_tiled.cu.

    A block has row_warps x token_warps warps, each of row_tiles of 16 rows by col_tiles of 8
    tokens. stages: of the block's ring buffer; k_split: blocks of a cluster that split K.
    """

    row_warps: int
    row_tiles: int
    token_warps: int
    col_tiles: int
    stages: int
    k_split: int

    source = "imma/group_gemm_tiled.cu"
    function = "flexq_imma_tiled"

    @property
    def threads(self) -> int:
        return self.row_warps * self.token_warps * 32

    @property
    def rows(self) -> int:
        return self.row_warps * self.row_tiles * MMA_ROWS

    @property
    def tokens(self) -> int:
        return self.token_warps * self.col_tiles * MMA_TOKENS

    def shared_bytes(self, tiles: TileFormat) -> int:
        return _block_bytes(self, tiles)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        return _tile_grid(self, m, n)


@dataclass(frozen=True, slots=True)
class WgmmaConfig(GroupGemmConfig):
    """Configuration of csrc/imma/group_gemm_wgmma.cu.

    A block tile is warpgroups of 64 rows each by granules of 64 tokens. stages: of the block's ring
    buffer; k_split: blocks of a cluster that split K.
    """

    warpgroups: int
    granules: int
    stages: int
    k_split: int

    source = "imma/group_gemm_wgmma.cu"
    function = "flexq_imma_wgmma"
    only_on_hopper = True

    @property
    def threads(self) -> int:
        return self.warpgroups * 128

    @property
    def rows(self) -> int:
        return self.warpgroups * 64

    @property
    def tokens(self) -> int:
        return self.granules * 64

    def shared_bytes(self, tiles: TileFormat) -> int:
        return _block_bytes(self, tiles)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        return _tile_grid(self, m, n)


@dataclass(frozen=True, slots=True)
class ClusterConfig(GroupGemmConfig):
    """Configuration of csrc/imma/group_gemm_cluster.cu.

    A block tile is row_warpgroups of 64 rows each by tokens. stages: of the block's ring buffer;
    k_split: blocks of a persistent cluster, at most eight; resident: 1, or 2 to leave room on the
    SMs for the blocks of the next launch.
    """

    row_warpgroups: int
    tokens: int
    stages: int
    k_split: int
    resident: int

    source = "imma/group_gemm_cluster.cu"
    function = "flexq_imma_cluster"
    only_on_hopper = True

    @property
    def threads(self) -> int:
        """Threads of a block: consumers and a producer warpgroup."""
        return (self.row_warpgroups + 1) * 128

    @property
    def rows(self) -> int:
        return self.row_warpgroups * 64

    @property
    def contributors(self) -> int:
        """Warps of a cluster that have the same rows."""
        return self.k_split

    @property
    def for_few_outputs(self) -> bool:
        """Return True if it is a candidate only where it splits K enough to use more SMs."""
        return self.k_split > 2 or self.row_warpgroups == 1

    def outputs(self, m: int, n: int) -> int:
        """Return the number of output tiles."""
        return -(-n // self.rows) * -(-m // self.tokens)

    def shared_bytes(self, tiles: TileFormat) -> int:
        # The ring buffer, partial sums, outputs and mbarriers.
        sums = self.row_warpgroups * 4 * _sums_bytes(self.tokens, self.contributors)
        return _ring_bytes(self, tiles) + sums + self.stages * 16

    def shares(self, m: int, n: int, steps: int, sms: int) -> Shares:
        """Divide the steps of K of all output tiles among persistent clusters (stream-K).

        On a multiple of the number of output tiles, few shares span two of them, or none if their
        steps divide evenly.
        """
        outputs = self.outputs(m, n)
        most = sms if self.k_split <= 2 else int(sms * _SMS_OF_LARGE_CLUSTERS)
        by_steps = outputs * steps // (MIN_STEPS * self.k_split)
        clusters = min(most // self.k_split, max(outputs, by_steps))
        shares = self._shares_of(clusters, outputs, steps)
        if clusters < outputs:
            return shares
        aligned = self._shares_of(clusters // outputs * outputs, outputs, steps)
        return aligned if aligned.longest <= shares.longest + _ALIGNED_STEPS else shares

    def _shares_of(self, clusters: int, outputs: int, steps: int) -> Shares:
        each, longer = divmod(outputs * steps, clusters)
        shared = outputs if longer or each % steps else 0
        is_aligned = not longer and 0 in (each % steps, steps % each)
        # A share that begins inside an output tile spans one more.
        spanned = -(-each // steps) if is_aligned else (each - 1) // steps + 2
        adders = min(self.contributors, 2)
        block_steps = -(-(each + (longer > 0)) // self.k_split)
        longest = block_steps + spanned * _CLUSTER_OUTPUT_STEPS[adders]
        if shared:
            longest += -(-steps // each) * _CLUSTER_ADDED_STEPS[adders]
        inverse = ((1 << 32) - 1) // steps
        return Shares(clusters * self.k_split, shared, each, longer, inverse, longest)

    def launched_blocks(self, shares: Shares, sms: int) -> int:
        """Return the blocks of a launch, including those without work.

        If the SMs have room for blocks of the next launch, every SM must get one of each launch.
        """
        return sms // self.k_split * self.k_split if self.resident > 1 else shares.blocks


def operand_bytes(n: int, k: int, tokens: int = 0) -> float:
    """Return the bytes of 6-bit weights [n, k] with their scales, and of int8 activations."""
    return k * (n * _BYTES_PER_WEIGHT + tokens)


@dataclass(frozen=True, slots=True)
class PersistentConfig(GroupGemmConfig):
    """Configuration of csrc/imma/group_gemm_persistent.cu.

    A block tile is 128 rows by granules of 128 tokens. sharers: blocks of a cluster that multicast
    tokens to each other; split: 1: stream-K; 2: the two blocks of a cluster compute half of K each
    of one output tile; 0: whole output tiles.
    """

    granules: int
    sharers: int
    split: int

    source = "imma/group_gemm_persistent.cu"
    function = "flexq_imma_bulk"
    only_on_hopper = True
    warpgroups = 2  # consumers; one more has the producer
    contributors = 1  # warps that reduce their partial sums before they are stored

    @property
    def stages(self) -> int:
        """Stages of the ring buffer, which with the rest fills the shared memory of an SM."""
        return 6 if self.granules == 1 else 4

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * 128

    @property
    def rows(self) -> int:
        return self.warpgroups * 64

    @property
    def tokens(self) -> int:
        return self.granules * 128

    def shared_bytes(self, tiles: TileFormat) -> int:
        # The ring buffer, outputs, mbarriers and constants.
        sums = self.warpgroups * 4 * _sums_bytes(self.tokens, contributors=1)
        return _ring_bytes(self, tiles) + sums + self.stages * 16 + 32

    @property
    def k_parts(self) -> int:
        """Blocks of a cluster that split the K of an output tile."""
        return max(self.split, 1)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.sharers * self.k_parts

    def shares(self, m: int, n: int, steps: int, sms: int) -> Shares:
        """Divide output tiles, of `steps` steps of K each, among the blocks of a GPU."""
        token_blocks = -(-m // self.tokens)
        outputs = -(-n // (self.rows * self.sharers)) * token_blocks
        if self.k_parts > 1:
            waves = -(-outputs * self.k_parts // sms)
            longest = waves * (-(-steps // self.k_parts) + _OUTPUT_STEPS + _ADDED_STEPS)
            return Shares(outputs * self.k_parts, 0, 0, 0, 0, longest)
        splits = self.split and steps >= 2 * MIN_STEPS
        max_clusters = outputs * steps // MIN_STEPS if splits else outputs
        clusters = min(max_clusters, sms // self.sharers)
        rest = outputs % clusters
        if not (splits and rest):
            return self._divided(outputs, 0, steps, clusters)
        # Up to two tiles per cluster: if only the remainder is shared, some blocks have to add the
        # partial sums of many others.
        evenly = self._divided(outputs, min(outputs, clusters + rest), steps, clusters)
        # But after an equal share of two tiles, blocks are at different steps of K.
        rereads = token_blocks > 1 and operand_bytes(n, steps * GROUP, m) > _IN_STEP_BYTES
        if rereads and rest * steps >= _IN_STEP_SHARE * clusters:
            in_step = self._divided(outputs, rest, steps, clusters)
            if in_step.longest <= _IN_STEP_LONGER * evenly.longest:
                return in_step
        return evenly

    def _divided(self, outputs: int, shared: int, steps: int, clusters: int) -> Shares:
        """Divide the steps of the first `shared` output tiles evenly among clusters."""
        each, longer = divmod(shared * steps, clusters)
        whole = -(-(outputs - shared) // clusters)
        longest = each + (longer > 0) + whole * (steps + _OUTPUT_STEPS)
        if shared:
            longest += -(-shared // clusters) * _OUTPUT_STEPS + -(-steps // each) * _ADDED_STEPS
        inverse = -(-(1 << 32) // steps)
        return Shares(clusters * self.sharers, shared, each, longer, inverse, longest)


@dataclass(frozen=True, slots=True)
class Shares:
    """Stream-K division of the steps of K of the first `shared` output tiles.

    blocks: persistent, one per SM. each: steps per cluster; the first `longer` have one more.
    inverse: 2^32 / steps of an output tile, rounded up, or down for a ClusterConfig. longest: time
    of the busiest block in steps: its steps, epilogues and additions of partial sums.
    """

    blocks: int
    shared: int
    each: int
    longer: int
    inverse: int
    longest: float


ManyConfig = TiledConfig | WgmmaConfig | ClusterConfig | PersistentConfig
AnyImmaConfig = ImmaConfig | ManyConfig

# Configurations for many tokens by their names in data files.
MANY_KINDS: dict[str, type[ManyConfig]] = {
    "tiled": TiledConfig,
    "wgmma": WgmmaConfig,
    "cluster": ClusterConfig,
    "persistent": PersistentConfig,
}


def _tile_grid(config: TiledConfig | WgmmaConfig, m: int, n: int) -> tuple[int, int, int]:
    """Return the grid: blocks along tokens, k_split each, and blocks along rows."""
    return -(-m // config.tokens) * config.k_split, -(-n // config.rows), 1


def _block_bytes(config: TiledConfig | WgmmaConfig, tiles: TileFormat) -> int:
    """Return the bytes of csrc/imma/block_tile.cuh: the ring buffer, aliased by the outputs."""
    return max(_ring_bytes(config, tiles), config.tokens * (config.rows + 4) * 4)


def _ring_bytes(config: ManyConfig, tiles: TileFormat) -> int:
    tile_rows = config.rows // MMA_ROWS
    token_bytes = GROUP + 4 * tiles.a_grouped
    used = config.tokens * token_bytes + tile_rows * (tiles.tile_bytes + tiles.scale_bytes)
    stage = -(-used // _SWIZZLE_BYTES) * _SWIZZLE_BYTES
    return config.stages * stage


def _sums_bytes(tokens: int, contributors: int) -> int:
    """Return the bytes of a warp in csrc/imma/warp_sums.cuh: outputs, partial sums, mbarriers."""
    chunks = chunks_of(tokens, contributors)
    partial_sums = (contributors - 1) * chunks * CHUNK * MMA_ROWS * 4
    return min(chunks, 4) * CHUNK * MMA_ROWS * 2 + partial_sums + 16 * (contributors > 1)


def chunks_of(tokens: int, contributors: int) -> int:
    """Return the largest number of chunks of CHUNK tokens that one of `contributors` warps owns."""
    return -(-tokens // CHUNK // contributors)


@cache  # called by every launch
def _build(config: GroupGemmConfig, tiles: TileFormat) -> Build:
    defines = config.defines()
    return Build.of(
        config.source,
        min_sm=90 if defines.get("K_SPLIT", 1) > 1 else 80,  # clusters
        only_sm=90 if config.only_on_hopper else None,
        block=Block(config.function, config.threads, config.shared_bytes(tiles)),
        **tiles.defines(),
        **defines,
    )
