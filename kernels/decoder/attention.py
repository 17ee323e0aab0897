"""Builds and split counts of decode attention (csrc/decode/attention.cu)."""

from __future__ import annotations

from flexq_bench.kernels.contract import Packing
from flexq_bench.kernels.decoder.operations import AttentionShape
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.runtime.nvrtc import Block, Build

ATTENTION = "decode_attention"
WARPS = 4
MAX_SPLITS = 8  # blocks of a cluster; the sums of more splits are reduced by a second kernel
_LONG = 4096  # tokens of a sequence from which on that is faster
_BLOCKS_PER_SM = 3  # at most, so that all blocks are resident at once
_TILE = 16  # positions of a tile
_MMA_K = 16  # values of a head that an MMA multiplies
_TILE_WORDS, _MAX_TILES = 64, 4  # per thread: registers of tiles in flight, and such tiles
_MAX_EXCHANGED = 1024  # values of the heads of a KV head that blocks of a cluster exchange
_MAX_SERIAL = 512  # of which a block stores the sums of all splits
_LANE_VALUES, _WARP, _GROUP = 8, 32, 128  # values per storing lane; lanes; values per code group
_MAX_HEADS = 8  # per KV head: columns of an MMA
_PACKINGS = {"halves": 0, "group-codes": 1}
_SPLITS = 3  # value of PACKING without a packing: store the partial sums of the splits


def split_count(units: int, longest: int, sms: int, tokens: int | None = None) -> int:
    """Return the number of splits of a sequence, a power of two. units: KV heads of all sequences.

    Beyond the number of resident blocks the overhead of a block outweighs its benefit. tokens: of a
    sequence for each of its splits; None: any number.
    """
    if tokens is not None:
        return min(1 << (-(-longest // tokens) - 1).bit_length(), MAX_SPLITS)
    max_splits = min(_BLOCKS_PER_SM * sms // units, -(-longest // (WARPS * _TILE)))
    if longest < _LONG:
        max_splits = min(max_splits, MAX_SPLITS)
    return 1 << max(max_splits.bit_length() - 1, 0)


def is_serial(shape: AttentionShape, batch: int, splits: int, sms: int) -> bool:
    """Return True if a block should compute all splits: with one for each, not all are resident.

    The splits of all heads of a KV head must fit in its shared memory.
    """
    values = shape.heads // shape.kv_heads * shape.head_dim
    blocks = batch * shape.kv_heads * splits
    return values <= _MAX_SERIAL and blocks > _BLOCKS_PER_SM * sms


def can_pack(packing: Packing, shape: AttentionShape) -> bool:
    """Return True if attention can write the next layer's packed activations.

    Codes with a scale per group require heads, or heads of a KV head, that consist of whole groups.
    """
    group = shape.heads // shape.kv_heads * shape.head_dim
    if group > _MAX_EXCHANGED:
        return False
    whole = group % _GROUP == 0 and 0 in (shape.head_dim % _GROUP, _GROUP % shape.head_dim)
    return packing.kind == "halves" or (packing.kind == "group-codes" and whole)


def attention_build(
    shape: AttentionShape,
    bits: int,
    packing: Packing | None,
    *,
    fp8: bool = False,
    norms_heads: bool = False,
    is_serial: bool = False,
) -> Build:
    """Return the build of the attention kernel. fp8: a token is rounded to E4M3 times a scale.

    norms_heads: of queries and keys, before rotation. is_serial: a block computes all splits of a
    sequence.

    packing None: the kernel stores the partial sums of its splits, which are reduced separately.
    Raises UnsupportedError for a head_dim or a number of heads per KV head that is not supported.
    """
    group = shape.heads // shape.kv_heads
    lanes = shape.head_dim // _LANE_VALUES
    if shape.head_dim % _LANE_VALUES or lanes > _WARP or group > _MAX_HEADS:
        raise UnsupportedError(
            "decode attention supports a head_dim that is a multiple of 8 up to 256, and up to 8 "
            f"heads per KV head: got {shape.head_dim} and {group}"
        )
    return Build.of(
        "decode/attention.cu",
        block=Block(ATTENTION, WARPS * _WARP),
        HEAD_DIM=shape.head_dim,
        GROUP_HEADS=group,
        KV_BITS=bits,
        **({"KV_E4M3": 1} if fp8 else {}),
        **({"HEAD_NORMS": 1} if norms_heads else {}),
        **({"SERIAL": 1} if is_serial else {}),
        ROTARY=int(shape.rotary is not None),
        PACKING=_SPLITS if packing is None else _PACKINGS[packing.kind],
        A_BITS=packing.bits if packing is not None and packing.kind == "group-codes" else 8,
        TILES=tiles(shape.head_dim, bits),
        WARPS=WARPS,
    )


def tiles(head_dim: int, bits: int) -> int:
    """Return the tiles that a warp loads at once, by its registers (csrc/decode/kv_cache.cuh)."""
    padded = -(-head_dim // _MMA_K) * _MMA_K

    def words(lanes: int, positions: int) -> int:
        width = 128 // bits
        while padded % (width * lanes) or head_dim % width:
            width //= 2
        return positions * padded // width // lanes * max(1, width * bits // 32)

    return max(1, min(_MAX_TILES, _TILE_WORDS // (words(4, 2) + words(8, 4))))
