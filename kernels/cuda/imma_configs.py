"""How the int8 tensor-core kernels may be compiled, and which way fits a shape.

Two sources read the same packed operands: csrc/flexq_imma.cu for few tokens, where every weight is
read once and nothing is shared, and csrc/flexq_imma_tiled.cu for many.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kernels.contract import Config
from kernels.runtime.nvrtc import Block, Build

GROUP = 128
MMA_ROWS, MMA_TOKENS = 16, 8
_SCALE_BYTES = MMA_ROWS * 2  # of a tile
_SWIZZLE_BYTES = 1024  # imma_block.cuh: 8 tokens; a stage is whole ones
_SHARE_BYTES = 16 * 32  # a warp's sums of 16 rows and 8 tokens
WGMMA_ARCH = "sm_90"  # the only one with warpgroup MMA
MOST_NATURAL = 32  # tokens: more have the order of warpgroup MMA, where there is one
MOST_FEW = 64  # tokens: from here on the kernel for few never won
LEAST_STEPS = 4  # of K that are worth a block of its own
LEAST_MANY = 16  # tokens: up to here the kernel for many never won


@dataclass(frozen=True, slots=True)
class TileFormat:
    """What a tile of weights is, as csrc/imma_layout.cuh defines it: 16 rows by 128 k.

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

    def defines(self) -> dict[str, int]:
        """Those that differ from what csrc/imma_layout.cuh supposes."""
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
    start only when the last weights are requested; col_tiles: of 8 tokens a block."""

    row_tiles: int
    warps: int
    stages: int
    k_split: int
    late: int
    col_tiles: int

    @property
    def function(self) -> str:
        """The kernel, and the source of csrc that it is in."""
        return "flexq_imma"

    def build(self, tiles: TileFormat) -> Build:
        """How csrc/flexq_imma.cu is compiled for this configuration."""
        return _build(self, tiles)

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_bytes(self, tiles: TileFormat) -> int:
        """Dynamic shared memory of a block, as csrc/flexq_imma.cu lays it out."""
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
        """The kernel, and the source of csrc that it is in."""
        return "flexq_imma_tiled"

    def build(self, tiles: TileFormat) -> Build:
        """How csrc/flexq_imma_tiled.cu is compiled for this configuration."""
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
        """Dynamic shared memory of a block, as csrc/flexq_imma_tiled.cu lays it out."""
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
        """The kernel, and the source of csrc that it is in."""
        return "flexq_imma_wgmma"

    def build(self, tiles: TileFormat) -> Build:
        """How csrc/flexq_imma_wgmma.cu is compiled for this configuration."""
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
        """Dynamic shared memory of a block, as csrc/imma_block.cuh lays it out."""
        return _block_bytes(self, tiles)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks: the chunks of tokens, each k_split times; the chunks of rows."""
        return -(-m // self.tokens) * self.k_split, -(-n // self.rows), 1


@dataclass(frozen=True, slots=True)
class BulkConfig(Config):
    """A block is warpgroups of 64 rows each by tokens_of_block tokens; stages of the block's ring;
    sharers: blocks of a cluster that share tokens; split: 1 where blocks share the last outputs."""

    warpgroups: int
    tokens_of_block: int
    stages: int
    sharers: int
    split: int
    magic: int = 1

    @property
    def function(self) -> str:
        """The kernel, and the source of csrc that it is in."""
        return "flexq_imma_bulk"

    def build(self, tiles: TileFormat) -> Build:
        """How csrc/flexq_imma_bulk.cu is compiled for this configuration."""
        return _build(self, tiles)

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 128

    @property
    def rows(self) -> int:
        return self.warpgroups * 64

    @property
    def tokens(self) -> int:
        return self.tokens_of_block

    def shared_bytes(self, tiles: TileFormat) -> int:
        """Dynamic shared memory of a block: the ring, the warps' outputs, barriers and constants."""
        return _ring_bytes(self, tiles) + self.warpgroups * 4 * 2048 + self.stages * 16 + 32

    def shares(self, m: int, n: int, k: int, sms: int) -> Shares:
        """How the blocks of a GPU with so many SMs divide the work."""
        outputs = -(-(-(-n // self.rows)) // self.sharers) * -(-m // self.tokens)
        steps = -(-k // GROUP)
        splits = self.split and steps >= 2 * LEAST_STEPS
        most = outputs * steps // LEAST_STEPS if splits else outputs
        clusters = min(most, sms // self.sharers)
        rest = outputs % clusters
        shared = min(outputs, clusters + rest) if splits and rest else 0
        each, longer = divmod(shared * steps, clusters)
        return Shares(clusters * self.sharers, shared, each, longer, -(-(1 << 32) // steps))


@dataclass(frozen=True, slots=True)
class Shares:
    """blocks: that stay, one an SM. They share the steps of K of the first `shared` outputs: each
    takes so many, the first `longer` one more. inverse: of the steps of K of an output, times 2^32."""

    blocks: int
    shared: int
    each: int
    longer: int
    inverse: int


AnyImmaConfig = ImmaConfig | TiledConfig | WgmmaConfig | BulkConfig


def _block_bytes(config: TiledConfig | WgmmaConfig, tiles: TileFormat) -> int:
    """Shared memory of csrc/imma_block.cuh: the ring of stages, or the outputs."""
    return max(_ring_bytes(config, tiles), config.tokens * (config.rows + 4) * 4)


def _ring_bytes(config: TiledConfig | WgmmaConfig | BulkConfig, tiles: TileFormat) -> int:
    tile_rows = config.rows // MMA_ROWS
    of_token = GROUP + 4 * tiles.a_grouped
    used = config.tokens * of_token + tile_rows * (tiles.tile_bytes + _SCALE_BYTES)
    stage = -(-used // _SWIZZLE_BYTES) * _SWIZZLE_BYTES
    return config.stages * stage


def _build(config: AnyImmaConfig, tiles: TileFormat) -> Build:
    defines = {name.upper(): value for name, value in asdict(config).items()}
    return Build.of(
        f"{config.function}.cu",
        min_sm=90 if not isinstance(config, BulkConfig) and config.k_split > 1 else 80,
        only_sm=90 if isinstance(config, WgmmaConfig | BulkConfig) else None,
        block=Block(config.function, config.threads, config.shared_bytes(tiles)),
        **tiles.defines(),
        **defines,
    )


# (row_tiles, warps, stages, k_split, late), by column tiles: those of some 50 that a greedy choice
# needs to come within 0.5 % of the best, on average over the shapes that were timed on an H200,
# and two that are faster inside steps of LLaMA-13B. None of them spills.
_FEW_TOKENS = {
    1: (
        (1, 4, 2, 1, 0),
        (1, 4, 2, 1, 1),
        (1, 8, 2, 1, 0),
        (1, 8, 2, 1, 1),
        (1, 16, 3, 1, 0),
        (2, 4, 2, 1, 0),
        (2, 4, 2, 1, 1),
        (2, 4, 2, 2, 0),
        (2, 8, 2, 1, 0),
        (2, 8, 2, 1, 1),
        (2, 8, 4, 1, 0),
        (2, 16, 2, 1, 0),
        (2, 16, 3, 1, 0),
        (4, 8, 2, 1, 0),
        (4, 8, 2, 1, 1),
        (4, 8, 3, 1, 0),
    ),
    2: (
        (1, 4, 2, 1, 0),
        (1, 4, 2, 2, 0),
        (1, 16, 2, 1, 0),
        (1, 16, 3, 1, 0),
        (2, 4, 2, 1, 0),
        (2, 4, 2, 1, 1),
        (2, 8, 2, 1, 0),
        (2, 8, 2, 1, 1),
        (2, 8, 3, 1, 0),
        (2, 16, 2, 1, 0),
        (3, 4, 2, 1, 0),
        (4, 4, 2, 1, 1),
        (5, 4, 3, 1, 0),
    ),
    4: (
        (1, 4, 3, 1, 0),
        (1, 8, 3, 1, 0),
        (2, 4, 3, 1, 0),
        (2, 8, 2, 1, 1),
        (2, 8, 2, 2, 1),
        (3, 4, 2, 1, 0),
        (3, 4, 2, 2, 0),
        (3, 4, 3, 1, 0),
    ),
}
# (row_warps, row_tiles, token_warps, col_tiles, stages, k_split): those that a greedy choice needs
# to come within 2 % of the best of 132, over the shapes and numbers of tokens that were timed on an
# H200; and some for GPUs without clusters.
_MANY_TOKENS = (
    (4, 2, 1, 8, 3, 1),
    (4, 2, 1, 8, 4, 1),
    (4, 2, 1, 8, 3, 2),
    (4, 2, 1, 8, 4, 2),
    (4, 2, 1, 4, 4, 1),
    (4, 2, 1, 4, 2, 2),
    (4, 2, 1, 4, 3, 2),
    (4, 2, 1, 4, 4, 2),
    (4, 2, 1, 4, 3, 4),
    (4, 1, 2, 4, 4, 2),
    (4, 1, 1, 4, 3, 1),
    (2, 1, 2, 4, 4, 1),
)
# (warpgroups, granules, stages, k_split): the same greedy choice of 33, within 1 %.
_WGMMA = (
    (1, 1, 3, 2),
    (1, 1, 4, 2),
    (1, 1, 4, 4),
    (1, 2, 3, 1),
    (1, 2, 3, 2),
    (1, 2, 3, 4),
    (1, 2, 4, 1),
    (1, 2, 4, 2),
    (1, 4, 2, 1),
    (1, 4, 2, 2),
    (2, 4, 2, 1),
)


# For 4-bit weights, by column tiles: what a greedy choice takes to come within 0.1 % of the best of
# 62 (of 25 for two tiles), over the shapes that were timed on an H200.
_FEW_NIBBLES = {
    1: (
        (1, 8, 2, 1, 0),
        (1, 8, 2, 1, 1),
        (1, 8, 2, 2, 0),
        (1, 16, 2, 1, 0),
        (1, 16, 2, 1, 1),
        (1, 16, 3, 1, 1),
        (2, 4, 2, 1, 1),
        (2, 8, 2, 1, 0),
        (2, 8, 2, 2, 1),
        (2, 16, 2, 1, 0),
        (2, 16, 2, 1, 1),
        (3, 8, 2, 1, 0),
        (4, 8, 2, 1, 0),
    ),
    2: (
        (1, 16, 2, 1, 0),
        (2, 4, 2, 1, 1),
        (2, 4, 4, 1, 0),
        (2, 8, 2, 1, 0),
        (2, 8, 3, 1, 0),
        (5, 4, 3, 1, 0),
    ),
    4: ((2, 8, 2, 1, 1), (3, 4, 2, 1, 0), (3, 4, 2, 2, 0), (3, 4, 3, 1, 0)),
}
_MANY_NIBBLES = ((4, 2, 1, 4, 3, 2), (4, 2, 1, 4, 4, 1), (4, 2, 1, 8, 3, 1))
_WGMMA_NIBBLES = (
    (1, 1, 3, 2),
    (1, 1, 4, 4),
    (1, 2, 3, 1),
    (1, 2, 3, 2),
    (1, 2, 4, 2),
    (2, 2, 4, 1),
    (2, 4, 2, 1),
)
# With totals in the tensor cores' accumulators a group begins before the last has ended; that takes
# three stages at least (csrc/flexq_imma_wgmma.cu).
_WGMMA_DUAL_GRAINED = (
    (1, 1, 4, 2),
    (1, 1, 4, 4),
    (2, 1, 4, 1),
    (2, 1, 4, 2),
    (1, 2, 4, 1),
    (1, 2, 4, 2),
    (2, 2, 4, 1),
    (2, 2, 4, 2),
    (3, 2, 4, 1),
)


def configs_for(m: int, *, in_mma_order: bool) -> list[AnyImmaConfig]:
    """Every configuration for m tokens of this order, whatever the GPU."""
    if in_mma_order:
        return [WgmmaConfig(*choice) for choice in _WGMMA]
    configs: list[AnyImmaConfig] = []
    if m <= MOST_FEW:
        configs += few_tokens(col_tiles_for(m))
    if m > LEAST_MANY:
        configs += many_tokens()
    return configs


def col_tiles_for(m: int) -> int:
    """Tiles of 8 tokens that one block of the kernel for few tokens takes."""
    return next((tiles for tiles in _FEW_TOKENS if m <= tiles * MMA_TOKENS), max(_FEW_TOKENS))


def few_tokens(col_tiles: int) -> list[ImmaConfig]:
    """Every configuration of the kernel for few tokens with this many column tiles."""
    return [ImmaConfig(*choice, col_tiles) for choice in _FEW_TOKENS[col_tiles]]


def many_tokens() -> list[TiledConfig]:
    """Every configuration of the kernel for many tokens."""
    return [TiledConfig(*choice) for choice in _MANY_TOKENS]


def all_configs() -> list[AnyImmaConfig]:
    """Every configuration for every number of tokens."""
    few = [config for tiles in _FEW_TOKENS for config in few_tokens(tiles)]
    return [*few, *many_tokens(), *(WgmmaConfig(*choice) for choice in _WGMMA)]


def few_nibbles(m: int) -> list[ImmaConfig]:
    """Every configuration of the kernel for few tokens for m of them and 4-bit weights."""
    tiles = col_tiles_for(m)
    return [ImmaConfig(*choice, tiles) for choice in _FEW_NIBBLES[tiles]]


def every_few_nibbles() -> list[ImmaConfig]:
    """The same for any number of tokens."""
    return [c for tiles in _FEW_NIBBLES for c in few_nibbles(tiles * MMA_TOKENS)]


def nibbles_for(m: int, tiles: TileFormat, *, in_mma_order: bool) -> list[AnyImmaConfig]:
    """As configs_for, for 4-bit weights."""
    if in_mma_order:
        return [*wgmma_nibbles(tiles)]
    few: list[AnyImmaConfig] = [*few_nibbles(m)] if m <= MOST_FEW else []
    many = [TiledConfig(*choice) for choice in _MANY_NIBBLES] if m > LEAST_MANY else []
    return [*few, *many]


def wgmma_nibbles(tiles: TileFormat) -> list[WgmmaConfig]:
    """Every configuration of the warpgroup kernel for 4-bit weights."""
    choices = _WGMMA_DUAL_GRAINED if tiles.dual_grained else _WGMMA_NIBBLES
    return [WgmmaConfig(*choice) for choice in choices]


def all_nibbles(tiles: TileFormat) -> list[AnyImmaConfig]:
    """As all_configs, for 4-bit weights."""
    many = [TiledConfig(*choice) for choice in _MANY_NIBBLES]
    return [*every_few_nibbles(), *many, *wgmma_nibbles(tiles)]


def bucket_of(m: int) -> int:
    """The power of two that m tokens are rounded up to: they have the same configurations."""
    return 1 << (m - 1).bit_length()
