"""FlexQ's quantization formula in Triton, in its own file because Triton parses the source.

Every Triton kernel that quantizes calls `scale_of` and `codes_of`, which compute what
`symmetric_quantization` defines, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton resolves each annotation of a kernel as a value of its own language.

import triton
import triton.language as tl


@triton.jit
def scale_of(largest, share, highest):
    """Return the scales of groups [tile_rows] with these largest magnitudes, rounded to FP16."""
    return tl.div_rn(largest * share, highest).to(tl.float16).to(tl.float32)


@triton.jit
def codes_of(x, scale, lowest, highest, tile_rows: tl.constexpr, block: tl.constexpr):
    """Divide x [tile_rows, block] by scales [tile_rows]; return quotients, rounded ones, and codes.

    Scale 0: zeros. Adding and subtracting 1.5 · 2^23 rounds ties to even, as codes are far smaller.
    """
    divisor = tl.where(scale == 0.0, float("inf"), scale)
    quotient = tl.div_rn(x, tl.broadcast_to(divisor[:, None], (tile_rows, block)))
    nearest = (quotient + 12582912.0) - 12582912.0
    return quotient, nearest, tl.minimum(tl.maximum(nearest, lowest), highest)


@triton.jit
def round_groups(
    x_pointer,
    rounded_pointer,
    scale_pointer,
    rows,
    k,
    groups,
    stride,
    clip,
    highest,
    lowest,
    length: tl.constexpr,
    block: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Round one group of `tile_rows` rows: store code times scale, and the scale."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    offset = tl.arange(0, block)
    column = tl.program_id(1) * length + offset
    inside = (row < rows)[:, None] & ((offset < length) & (column < k))[None, :]
    start = row.to(tl.int64)
    x = tl.load(x_pointer + start[:, None] * stride + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    missing = tl.sum((x != x).to(tl.int32), axis=1)  # tl.max ignores NaN
    largest = tl.where(missing > 0, float("nan"), largest)
    scale = scale_of(largest, clip, highest)
    _, _, code = codes_of(x, scale, lowest, highest, tile_rows, block)
    tl.store(
        rounded_pointer + start[:, None] * k + column[None, :], code * scale[:, None], mask=inside
    )
    tl.store(
        scale_pointer + start * groups + tl.program_id(1), scale.to(tl.float16), mask=row < rows
    )
