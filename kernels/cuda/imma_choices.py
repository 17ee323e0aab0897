"""Which configurations of the int8 tensor-core kernels are worth timing, by bits of the weights."""

from __future__ import annotations

from collections.abc import Iterable

from kernels.cuda.imma_configs import (
    LEAST_MANY,
    MMA_TOKENS,
    MOST_FEW,
    AnyImmaConfig,
    BulkConfig,
    ImmaConfig,
    TiledConfig,
    TileFormat,
    WgmmaConfig,
)

# (row_tiles, warps, stages, k_split, late, ahead), by column tiles: what a greedy choice among some
# 100 (40 for two tiles, 20 for four) takes to come within 0.4 % of the best, on average over the
# shapes that were timed on an H200; those that were fastest inside steps of LLaMA-13B; and some for
# GPUs without clusters. None of them spills.
_FEW_TOKENS = {
    1: (
        (1, 4, 2, 1, 0, 1),
        (1, 4, 2, 1, 1, 1),
        (1, 4, 3, 1, 0, 3),
        (1, 8, 2, 1, 0, 1),
        (1, 8, 2, 1, 0, 2),
        (1, 8, 2, 1, 0, 3),
        (1, 8, 3, 1, 0, 3),
        (1, 8, 3, 1, 1, 3),
        (1, 16, 3, 1, 0, 1),
        (1, 16, 3, 1, 0, 3),
        (2, 4, 2, 1, 0, 1),
        (2, 4, 2, 1, 1, 1),
        (2, 4, 3, 1, 0, 4),
        (2, 8, 2, 1, 0, 2),
        (2, 8, 2, 1, 0, 4),
        (2, 8, 3, 1, 0, 4),
        (2, 8, 3, 1, 1, 4),
        (2, 8, 4, 1, 0, 3),
        (2, 16, 3, 1, 0, 3),
        (2, 16, 4, 1, 0, 3),
        (3, 8, 2, 1, 0, 2),
        (3, 8, 3, 1, 0, 4),
        (4, 4, 3, 1, 0, 4),
        (4, 8, 2, 1, 0, 2),
        (4, 8, 2, 1, 1, 1),
        (4, 8, 2, 1, 1, 2),
    ),
    2: (
        (1, 4, 2, 1, 0, 1),
        (1, 16, 2, 1, 0, 3),
        (1, 16, 3, 1, 0, 3),
        (2, 4, 2, 1, 0, 1),
        (2, 4, 2, 1, 0, 3),
        (2, 4, 3, 1, 0, 3),
        (2, 8, 2, 1, 0, 2),
        (2, 8, 2, 1, 1, 1),
        (2, 8, 3, 1, 0, 1),
        (2, 8, 3, 1, 0, 3),
        (2, 16, 2, 1, 0, 1),
        (3, 4, 2, 1, 0, 1),
        (3, 4, 3, 1, 0, 2),
    ),
    4: (
        (1, 4, 3, 1, 0, 1),
        (1, 8, 3, 1, 0, 2),
        (2, 4, 2, 1, 0, 2),
        (2, 8, 2, 1, 1, 1),
        (2, 8, 2, 2, 1, 1),
        (2, 8, 3, 1, 0, 2),
        (3, 4, 2, 1, 0, 1),
        (3, 4, 2, 1, 0, 2),
        (3, 4, 2, 2, 0, 1),
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
# (warpgroups, granules, stages, k_split) and (granules, sharers, split): the same greedy choice of
# 11 and 6, within 0.01 %, worst 3 %.
_WGMMA = (
    (1, 1, 3, 2),
    (1, 1, 4, 2),
    (1, 1, 4, 4),
    (1, 2, 3, 1),
    (1, 2, 3, 2),
    (1, 2, 4, 2),
)
_BULK = (
    (1, 1, 0),
    (1, 1, 1),
    (2, 1, 0),
    (2, 1, 1),
    (2, 2, 1),
)


# The same for 4-bit weights, of some 50 (20 for two tiles); for four tiles, what won for 6 bits and
# what had won here.
_FEW_NIBBLES = {
    1: (
        (1, 8, 2, 1, 0, 1),
        (1, 8, 2, 1, 1, 1),
        (1, 8, 2, 2, 0, 1),
        (1, 16, 2, 1, 0, 1),
        (1, 16, 2, 1, 0, 2),
        (1, 16, 3, 1, 0, 2),
        (1, 16, 3, 1, 1, 1),
        (1, 16, 3, 1, 1, 2),
        (1, 16, 3, 1, 1, 3),
        (2, 4, 2, 1, 1, 1),
        (2, 8, 2, 1, 0, 1),
        (2, 8, 2, 2, 1, 1),
        (2, 8, 3, 1, 0, 3),
        (2, 16, 2, 1, 0, 1),
        (2, 16, 2, 1, 1, 1),
        (3, 8, 2, 1, 0, 1),
        (3, 8, 2, 1, 0, 2),
        (3, 8, 2, 1, 0, 3),
        (4, 8, 2, 1, 0, 1),
    ),
    2: (
        (1, 16, 2, 1, 0, 1),
        (1, 16, 2, 1, 0, 2),
        (1, 16, 3, 1, 0, 2),
        (1, 16, 3, 1, 0, 3),
        (2, 4, 2, 1, 1, 1),
        (2, 4, 2, 1, 1, 2),
        (2, 4, 3, 1, 1, 2),
        (2, 4, 4, 1, 0, 2),
        (2, 8, 2, 1, 0, 1),
        (5, 4, 3, 1, 0, 1),
    ),
    4: (
        (1, 8, 3, 1, 0, 2),
        (2, 4, 2, 1, 0, 2),
        (2, 8, 2, 1, 1, 1),
        (2, 8, 3, 1, 0, 2),
        (3, 4, 2, 1, 0, 1),
        (3, 4, 2, 2, 0, 1),
        (3, 4, 3, 1, 0, 1),
    ),
}
_MANY_NIBBLES = ((4, 2, 1, 4, 3, 2), (4, 2, 1, 4, 4, 1), (4, 2, 1, 8, 3, 1))
_WGMMA_NIBBLES = (
    (1, 1, 3, 2),
    (1, 1, 4, 4),
    (1, 2, 3, 1),
    (1, 2, 4, 2),
    (2, 2, 4, 1),
)
# With totals in the tensor cores' accumulators a group begins before the last has ended; that takes
# three stages at least (csrc/imma/group_gemm_wgmma.cu).
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
        return in_order()
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
    return _with_tiles(_FEW_TOKENS[col_tiles], col_tiles)


def many_tokens() -> list[TiledConfig]:
    """Every configuration of the kernel for many tokens."""
    return [TiledConfig(*choice) for choice in _MANY_TOKENS]


def all_configs() -> list[AnyImmaConfig]:
    """Every configuration for every number of tokens."""
    few = [config for tiles in _FEW_TOKENS for config in few_tokens(tiles)]
    return [*few, *many_tokens(), *in_order()]


def in_order() -> list[AnyImmaConfig]:
    """Every configuration for tokens in the order of warpgroup MMA."""
    return [*(WgmmaConfig(*choice) for choice in _WGMMA), *bulk()]


def bulk() -> list[BulkConfig]:
    """Every configuration of the kernel for the most tokens."""
    return [BulkConfig(*choice) for choice in _BULK]


def few_nibbles(m: int) -> list[ImmaConfig]:
    """Every configuration of the kernel for few tokens for m of them and 4-bit weights."""
    tiles = col_tiles_for(m)
    return _with_tiles(_FEW_NIBBLES[tiles], tiles)


def every_few_nibbles() -> list[ImmaConfig]:
    """The same for any number of tokens."""
    return [c for tiles in _FEW_NIBBLES for c in few_nibbles(tiles * MMA_TOKENS)]


def nibbles_for(m: int, tiles: TileFormat, *, in_mma_order: bool) -> list[AnyImmaConfig]:
    """As configs_for, for 4-bit weights."""
    if in_mma_order:
        return nibbles_in_order(tiles)
    few: list[AnyImmaConfig] = [*few_nibbles(m)] if m <= MOST_FEW else []
    many = [TiledConfig(*choice) for choice in _MANY_NIBBLES] if m > LEAST_MANY else []
    return [*few, *many]


def nibbles_in_order(tiles: TileFormat) -> list[AnyImmaConfig]:
    """As in_order, for 4-bit weights."""
    if tiles.dual_grained:
        return [WgmmaConfig(*choice) for choice in _WGMMA_DUAL_GRAINED]
    return [*(WgmmaConfig(*choice) for choice in _WGMMA_NIBBLES), *bulk()]


def all_nibbles(tiles: TileFormat) -> list[AnyImmaConfig]:
    """As all_configs, for 4-bit weights."""
    many = [TiledConfig(*choice) for choice in _MANY_NIBBLES]
    return [*every_few_nibbles(), *many, *nibbles_in_order(tiles)]


def bucket_of(m: int) -> int:
    """The power of two that m tokens are rounded up to: they have the same configurations."""
    return 1 << (m - 1).bit_length()


def _with_tiles(
    choices: Iterable[tuple[int, int, int, int, int, int]], col_tiles: int
) -> list[ImmaConfig]:
    return [
        ImmaConfig(row_tiles, warps, stages, k_split, late, col_tiles, ahead)
        for row_tiles, warps, stages, k_split, late, ahead in choices
    ]
