"""Configurations of the int8 tensor-core kernels: how they are compiled and launched.

Five sources read the same packed weights: csrc/imma/group_gemm.cu for few tokens, where every
weight is read once and nothing is shared, csrc/imma/group_gemm_tiled.cu for many, and on Hopper
csrc/imma/group_gemm_wgmma.cu, csrc/imma/group_gemm_cluster.cu (TMA, up to 128 tokens) and
csrc/imma/group_gemm_persistent.cu (TMA, warp-specialized).
configuration_choice.py chooses among them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

from kernels.contract import Config
from kernels.runtime.nvrtc import Block, Build

GROUP = 128
MMA_ROWS, MMA_TOKENS = 16, 8
_SCALE_BYTES = MMA_ROWS * 2  # of a tile
_SWIZZLE_BYTES = 1024  # block_tile.cuh: 8 tokens; a stage is whole ones
CHUNK = 16  # warp_sums.cuh: tokens of which a warp adds up its rows' partial sums
_SHARE_BYTES = 16 * 32  # a warp's sums of 16 rows and 8 tokens
WGMMA_ARCH = "sm_90"  # the only one with warpgroup MMA
LEAST_STEPS = 4  # of K that are worth a block of its own
# Of a persistent block: the epilogue of an output tile and adding another block's partial sums, in
# steps of K. By a regression of times of group_gemm_persistent.cu on an H200.
_OUTPUT_STEPS, _ADDED_STEPS = 2.5, 1.25
# The same of group_gemm_cluster.cu with stream_k, by the warps that first add up their sums in a
# cluster. By a regression of times like those in examples/h200/token-tiles-times.json.gz.
_CLUSTER_OUTPUT_STEPS, _CLUSTER_ADDED_STEPS = {1: 1.5, 2: 2.5}, {1: 1.0, 2: 1.5}
_NEARLY_ALL = 0.95  # of the clusters: so many are as good as all


@dataclass(frozen=True, slots=True)
class TileFormat:
    """Format of a tile of weights, 16 rows by 128 k, as csrc/imma/layout.cuh defines it.

    int8_tail: the last group has 8-bit codes. dual_grained: integer scales and zero points of
    groups. a_grouped: activations have a scale per group, not one a token. int4_mma: on the int4
    tensor core even where it is emulated; else where there is one.
    """

    w_bits: int = 6
    int8_tail: bool = False
    dual_grained: bool = False
    a_grouped: bool = True
    int4_mma: bool = False

    @property
    def tile_bytes(self) -> int:
        return MMA_ROWS * GROUP * self.w_bits // 8

    def steps(self, k: int) -> int:
        """Tiles in a row of them."""
        return -(-k // GROUP) + self.int8_tail

    def defines(self) -> dict[str, int]:
        """Defines that differ from the defaults of csrc/imma/layout.cuh."""
        return {
            name.upper(): int(value)
            for name, value in asdict(self).items()
            if value != getattr(SIX_BITS, name)
        }


SIX_BITS = TileFormat()


@dataclass(frozen=True, slots=True)
class ImmaConfig(Config):
    """row_tiles: of 16 rows a block; warps: ways to split K in a block; stages of each warp's
    ring; k_split: blocks of a cluster that share a row tile; late: 1 where the next kernel may
    start only when the last weights are requested; col_tiles: of 8 tokens a block; ahead: steps of
    a warp whose activations are on their way."""

    row_tiles: int
    warps: int
    stages: int
    k_split: int
    late: int
    col_tiles: int
    ahead: int = 1

    @property
    def function(self) -> str:
        return "flexq_imma"

    def build(self, tiles: TileFormat) -> Build:
        """Return the build of csrc/imma/group_gemm.cu for this configuration."""
        return _build(self, tiles)

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_bytes(self, tiles: TileFormat) -> int:
        """Dynamic shared memory of a block, as csrc/imma/group_gemm.cu lays it out."""
        reduction = self.warps * self.row_tiles * self.col_tiles * _SHARE_BYTES
        return max(reduction, self.warps * self.stages * self.row_tiles * tiles.tile_bytes)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks: the row tiles, each k_split times; the chunks of tokens."""
        blocks = -(-n // (MMA_ROWS * self.row_tiles)) * self.k_split
        return blocks, -(-m // (self.col_tiles * MMA_TOKENS)), 1


@dataclass(frozen=True, slots=True)
class TiledConfig(Config):
    """A block is row_warps x token_warps warps, each with row_tiles of 16 rows by col_tiles of 8
    tokens; stages of the block's ring; k_split: blocks of a cluster that share an output tile."""

    row_warps: int
    row_tiles: int
    token_warps: int
    col_tiles: int
    stages: int
    k_split: int

    @property
    def function(self) -> str:
        return "flexq_imma_tiled"

    def build(self, tiles: TileFormat) -> Build:
        """Return the build of csrc/imma/group_gemm_tiled.cu for this configuration."""
        return _build(self, tiles)

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
        """Dynamic shared memory of a block, as csrc/imma/group_gemm_tiled.cu lays it out."""
        return _block_bytes(self, tiles)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks: the chunks of tokens, each k_split times; the chunks of rows."""
        return -(-m // self.tokens) * self.k_split, -(-n // self.rows), 1


@dataclass(frozen=True, slots=True)
class WgmmaConfig(Config):
    """A block is warpgroups of 64 rows each by granules of 64 tokens; stages of the block's ring;
    k_split: blocks of a cluster that share an output tile."""

    warpgroups: int
    granules: int
    stages: int
    k_split: int

    @property
    def function(self) -> str:
        return "flexq_imma_wgmma"

    def build(self, tiles: TileFormat) -> Build:
        """Return the build of csrc/imma/group_gemm_wgmma.cu for this configuration."""
        return _build(self, tiles)

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
        """Dynamic shared memory of a block, as csrc/imma/block_tile.cuh lays it out."""
        return _block_bytes(self, tiles)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks: the chunks of tokens, each k_split times; the chunks of rows."""
        return -(-m // self.tokens) * self.k_split, -(-n // self.rows), 1


@dataclass(frozen=True, slots=True)
class ClusterConfig(Config):
    """A block is row_warpgroups of 64 rows each by tokens; k_warpgroups sets of them take the
    stages of its ring in turn; k_split: blocks of a cluster that share an output tile; resident:
    blocks that fit on an SM; stream_k: 1 where clusters are persistent and share output tiles, and
    resident 2 is room for a block of the next launch."""

    row_warpgroups: int
    k_warpgroups: int
    tokens: int
    stages: int
    k_split: int
    resident: int
    stream_k: int = 0

    @property
    def function(self) -> str:
        return "flexq_imma_cluster"

    def build(self, tiles: TileFormat) -> Build:
        """Return the build of csrc/imma/group_gemm_cluster.cu for this configuration."""
        return _build(self, tiles)

    @property
    def threads(self) -> int:
        """With stream_k a warpgroup more has the producer's warp."""
        return (self.row_warpgroups * self.k_warpgroups + self.stream_k) * 128

    @property
    def rows(self) -> int:
        return self.row_warpgroups * 64

    @property
    def k_sets(self) -> int:
        """Warps of a block that have the same rows."""
        return self.k_warpgroups

    @property
    def contributors(self) -> int:
        """Warps of a cluster that have the same rows."""
        return self.k_split * self.k_sets

    def shared_bytes(self, tiles: TileFormat) -> int:
        """Dynamic shared memory of a block: ring and barriers, which partial sums overwrite; with
        stream_k, they and the outputs lie behind the ring."""
        if self.stream_k:
            warps = self.row_warpgroups * self.k_warpgroups * 4
            sums = warps * _sums_bytes(self.tokens, self.contributors)
            return _ring_bytes(self, tiles) + sums + self.stages * 16
        partial_sums = self.k_warpgroups * self.tokens * (self.rows + 4) * 4
        return max(_ring_bytes(self, tiles) + self.stages * 16, partial_sums)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks: the chunks of tokens, each k_split times; the chunks of rows."""
        return -(-m // self.tokens) * self.k_split, -(-n // self.rows), 1

    def shares(self, m: int, n: int, steps: int, sms: int) -> Shares:
        """Division of all output tiles' steps of K among persistent clusters."""
        outputs = -(-n // self.rows) * -(-m // self.tokens)
        clusters = sms // self.k_split
        clusters = max(1, min(clusters, outputs * steps // (LEAST_STEPS * self.k_split)))
        clusters = _even(clusters, outputs)
        each, longer = divmod(outputs * steps, clusters)
        shared = outputs if longer or each % steps else 0
        is_aligned = not longer and 0 in (each % steps, steps % each)
        # A share that begins inside an output ends inside one more.
        own_outputs = -(-each // steps) if is_aligned else (each - 1) // steps + 2
        adders = min(self.contributors, 2)
        own_steps = -(-(each + (longer > 0)) // self.k_split)
        longest = own_steps + own_outputs * _CLUSTER_OUTPUT_STEPS[adders]
        if shared:
            longest += -(-steps // each) * _CLUSTER_ADDED_STEPS[adders]
        inverse = ((1 << 32) - 1) // steps
        return Shares(clusters * self.k_split, shared, each, longer, inverse, longest)

    def launched_blocks(self, shares: Shares, sms: int) -> int:
        """Blocks of a launch, those without a share included.

        Where the next launch's blocks fit beside this one's, every SM must have one of each.
        """
        return sms // self.k_split * self.k_split if self.resident > 1 else shares.blocks


@dataclass(frozen=True, slots=True)
class PersistentConfig(Config):
    """A block is 128 rows by granules of 128 tokens; sharers: blocks of a cluster that share
    tokens; split: 1 where blocks share output tiles (stream-K), 2 where two blocks of a cluster
    have half of the K of one each."""

    granules: int
    sharers: int
    split: int

    @property
    def function(self) -> str:
        return "flexq_imma_bulk"

    def build(self, tiles: TileFormat) -> Build:
        """Return the build of csrc/imma/group_gemm_persistent.cu for this configuration."""
        return _build(self, tiles)

    @property
    def stages(self) -> int:
        """Of the block's ring, which with the rest fills an SM's shared memory."""
        return 6 if self.granules == 1 else 4

    @property
    def warpgroups(self) -> int:
        """Consumers; one more warpgroup has the producer's warp."""
        return 2

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
        """Dynamic shared memory of a block: ring, outputs, barriers and constants."""
        sums = self.warpgroups * 4 * _sums_bytes(self.tokens, contributors=1)
        return _ring_bytes(self, tiles) + sums + self.stages * 16 + 32

    @property
    def k_sets(self) -> int:
        """Warps of a block that have the same rows."""
        return 1

    @property
    def contributors(self) -> int:
        """Warps whose partial sums are added before they go to memory."""
        return 1

    @property
    def k_parts(self) -> int:
        """Blocks of a cluster that divide the K of an output tile."""
        return max(self.split, 1)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.sharers * self.k_parts

    def shares(self, m: int, n: int, steps: int, sms: int) -> Shares:
        """Division of output tiles of so many steps of K among the blocks of a GPU."""
        outputs = -(-n // (self.rows * self.sharers)) * -(-m // self.tokens)
        if self.k_parts > 1:
            waves = -(-outputs * self.k_parts // sms)
            longest = waves * (-(-steps // self.k_parts) + _OUTPUT_STEPS + _ADDED_STEPS)
            return Shares(outputs * self.k_parts, 0, 0, 0, 0, longest)
        splits = self.split and steps >= 2 * LEAST_STEPS
        most = outputs * steps // LEAST_STEPS if splits else outputs
        clusters = min(most, sms // self.sharers)
        rest = outputs % clusters
        # Two for each: were the rest alone shared, its first blocks would have many sums to add.
        shared = min(outputs, clusters + rest) if splits and rest else 0
        each, longer = divmod(shared * steps, clusters)
        whole = -(-(outputs - shared) // clusters)
        longest = each + (longer > 0) + whole * (steps + _OUTPUT_STEPS)
        if shared:
            longest += -(-shared // clusters) * _OUTPUT_STEPS + -(-steps // each) * _ADDED_STEPS
        return Shares(
            clusters * self.sharers, shared, each, longer, -(-(1 << 32) // steps), longest
        )


@dataclass(frozen=True, slots=True)
class Shares:
    """Stream-K division. blocks: persistent, one an SM. They share the steps of K of the first
    `shared` output tiles: each takes so many, the first `longer` one more. inverse: of the steps of
    an output tile, times 2^32, rounded up, or down for a ClusterConfig. longest: time of the
    busiest block in steps: its steps, epilogues and additions of partial sums."""

    blocks: int
    shared: int
    each: int
    longer: int
    inverse: int
    longest: float


AnyImmaConfig = ImmaConfig | TiledConfig | WgmmaConfig | ClusterConfig | PersistentConfig


# Their functions are named flexq_imma*, as in stored profiles and resource tables.
_SOURCES = {
    ImmaConfig: "imma/group_gemm.cu",
    TiledConfig: "imma/group_gemm_tiled.cu",
    WgmmaConfig: "imma/group_gemm_wgmma.cu",
    ClusterConfig: "imma/group_gemm_cluster.cu",
    PersistentConfig: "imma/group_gemm_persistent.cu",
}


def _block_bytes(config: TiledConfig | WgmmaConfig, tiles: TileFormat) -> int:
    """Shared memory of csrc/imma/block_tile.cuh: the ring of stages, or the outputs."""
    return max(_ring_bytes(config, tiles), config.tokens * (config.rows + 4) * 4)


def _ring_bytes(
    config: TiledConfig | WgmmaConfig | ClusterConfig | PersistentConfig, tiles: TileFormat
) -> int:
    tile_rows = config.rows // MMA_ROWS
    of_token = GROUP + 4 * tiles.a_grouped
    used = config.tokens * of_token + tile_rows * (tiles.tile_bytes + _SCALE_BYTES)
    stage = -(-used // _SWIZZLE_BYTES) * _SWIZZLE_BYTES
    return config.stages * stage


def _even(clusters: int, outputs: int) -> int:
    """Return `clusters`, or a slightly smaller multiple of `outputs` if there is one.

    With a multiple, few shares span two outputs, and none does if an output's steps divide evenly.
    """
    whole = clusters // outputs * outputs
    return whole if whole >= _NEARLY_ALL * clusters else clusters


def _sums_bytes(tokens: int, contributors: int) -> int:
    """Of a warp, as csrc/imma/warp_sums.cuh lays it out: outputs, others' sums and barriers."""
    own = chunks_of(tokens, contributors)
    received = (contributors - 1) * own * CHUNK * MMA_ROWS * 4
    return min(own, 4) * CHUNK * MMA_ROWS * 2 + received + 16 * (contributors > 1)


def chunks_of(tokens: int, contributors: int) -> int:
    """Most chunks of CHUNK tokens whose sums one of so many warps adds up."""
    return -(-tokens // CHUNK // contributors)


@cache  # every launch asks
def _build(config: AnyImmaConfig, tiles: TileFormat) -> Build:
    defines = {name.upper(): value for name, value in asdict(config).items()}
    return Build.of(
        _SOURCES[type(config)],
        min_sm=90 if not isinstance(config, PersistentConfig) and config.k_split > 1 else 80,
        only_sm=90 if isinstance(config, WgmmaConfig | ClusterConfig | PersistentConfig) else None,
        block=Block(config.function, config.threads, config.shared_bytes(tiles)),
        **tiles.defines(),
        **defines,
    )
