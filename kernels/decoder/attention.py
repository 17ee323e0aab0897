"""How attention of a decode step is compiled and split (csrc/decode_attention.cu)."""

from __future__ import annotations

from kernels.contract import Packing
from kernels.decoder.operations import AttentionShape
from kernels.errors import UnsupportedError
from kernels.runtime.nvrtc import Block, Build

ATTENTION = "decode_attention"
WARPS = 4
MOST_SPLITS = 8  # that a cluster has: more are added up by a kernel of their own
_TILES = {16: 1, 8: 1, 4: 2}  # by width of the cache: of 16 positions, that a warp has in flight
_LANE_VALUES, _WARP, _GROUP = 8, 32, 128  # of a lane that writes; lanes; values of a group of codes
_TILE = 16  # positions of a tile
_MOST_HEADS = 8  # that share a KV head: columns of an MMA
_PACKINGS = {"halves": 0, "group-codes": 1}
_SPLITS = 3  # of no packing: sums of the splits


_ENOUGH_BLOCKS_PER_SM = 8


def split_count(units: int, longest: int, bits: int, sms: int) -> int:
    """Blocks that share out a sequence. units: KV heads of all sequences."""
    wanted = -(-_ENOUGH_BLOCKS_PER_SM * sms // units)
    most = -(-longest // (WARPS * _TILES[bits] * _TILE))
    return min(wanted, most)


def can_pack(packing: Packing, shape: AttentionShape) -> bool:
    """Whether attention itself writes the next layer's activations: a head has whole groups."""
    return packing.kind == "halves" or (
        packing.kind == "group-codes" and shape.head_dim % _GROUP == 0
    )


def attention_build(shape: AttentionShape, bits: int, packing: Packing | None) -> Build:
    """How the kernel is compiled. packing None: it leaves its splits to be added up.

    Raises UnsupportedError for other head sizes.
    """
    group = shape.heads // shape.kv_heads
    lanes = shape.head_dim // _LANE_VALUES
    if shape.head_dim % _LANE_VALUES or lanes > _WARP or group > _MOST_HEADS:
        raise UnsupportedError(
            f"decode attention has heads of a multiple of 8 up to 256 values, up to 8 a KV head: "
            f"got {shape.head_dim} and {group}"
        )
    return Build.of(
        "decode_attention.cu",
        block=Block(ATTENTION, WARPS * _WARP),
        HEAD_DIM=shape.head_dim,
        GROUP_HEADS=group,
        KV_BITS=bits,
        ROTARY=int(shape.rotary is not None),
        PACKING=_SPLITS if packing is None else _PACKINGS[packing.kind],
        A_BITS=packing.bits if packing is not None and packing.kind == "group-codes" else 8,
        TILES=_TILES[bits],
        WARPS=WARPS,
    )
