"""Operators whose order of additions depends on the row alone, in Triton.

In a file of its own because Triton parses the source. A program computes one row, or one head of a
token; reductions within it have the shape of its tile, and tiles follow each other in order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton resolves each annotation of a kernel as a value of its own language.

import triton
import triton.language as tl


@triton.jit
def rms_norm(x_pointer, weight_pointer, out_pointer, columns, eps, block: tl.constexpr):
    """Write the RMS norm of one row, FP16."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = column < columns
    x = tl.load(x_pointer + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / columns + eps)
    weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
    normal = (x * inverse).to(tl.float16).to(tl.float32)
    tl.store(out_pointer + row * columns + column, (normal * weight).to(tl.float16), mask=inside)


# One program for all batches: sizes that a batch decides are not compiled in.
@triton.jit(do_not_specialize=["tokens", "capacity", "layer"])
def attention(
    query_pointer,
    cache_pointer,
    slot_pointer,
    position_pointer,
    out_pointer,
    scale,
    heads,
    kv_heads,
    capacity,
    layer,
    tokens,
    head_dim: tl.constexpr,
    block: tl.constexpr,
):
    """Write the attention of one head of one token to the cached tokens up to its own.

    cache: FP16 [2, slots, kv_heads, capacity, head_dim]; layer: elements of its keys.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_pointer + row // tokens).to(tl.int64)
    last = tl.load(position_pointer + row).to(tl.int32)
    at_dim = tl.arange(0, head_dim)
    place = (row * heads + head) * head_dim + at_dim
    query = tl.load(query_pointer + place).to(tl.float32) * scale
    keys = cache_pointer + (slot * kv_heads + head // (heads // kv_heads)) * capacity * head_dim
    largest, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    sums = tl.zeros((head_dim,), tl.float32)
    for start in range(0, last + 1, block):
        at = start + tl.arange(0, block)
        inside = at <= last
        places = at[:, None] * head_dim + at_dim[None, :]
        k = tl.load(keys + places, mask=inside[:, None], other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(k * query[None, :], axis=1), float("-inf"))
        next_largest = tl.maximum(largest, tl.max(scores, axis=0))
        fade = tl.exp(largest - next_largest)
        shares = tl.exp(scores - next_largest)
        v = tl.load(keys + layer + places, mask=inside[:, None], other=0.0).to(tl.float32)
        sums = sums * fade + tl.sum(shares[:, None] * v, axis=0)
        total = total * fade + tl.sum(shares, axis=0)
        largest = next_largest
    tl.store(out_pointer + place, (sums / total).to(tl.float16))


@triton.jit(do_not_specialize=["rows"])
def project(
    x_pointer,
    w_pointer,
    y_pointer,
    rows,
    features,
    columns,
    tile_rows: tl.constexpr,
    tile_features: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Write one tile of Y FP32 [rows, features] = X · W^T, FP16 [rows, columns] and [features, …].

    The columns are added in order, for any number of rows.
    """
    feature = tl.program_id(0) * tile_features + tl.arange(0, tile_features)
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, tile_columns)
    sums = tl.zeros((tile_rows, tile_features), tl.float32)
    at_row = row.to(tl.int64)[:, None] * columns
    at_feature = feature.to(tl.int64)[:, None] * columns
    of_rows, of_features = (row < rows)[:, None], (feature < features)[:, None]
    for start in range(0, columns, tile_columns):
        at = start + column
        inside = (at < columns)[None, :]
        x = tl.load(x_pointer + at_row + at[None, :], mask=of_rows & inside, other=0.0)
        w = tl.load(w_pointer + at_feature + at[None, :], mask=of_features & inside, other=0.0)
        sums = tl.dot(x, tl.trans(w), sums)
    place = row.to(tl.int64)[:, None] * features + feature[None, :]
    tl.store(y_pointer + place, sums, mask=(row < rows)[:, None] & (feature < features)[None, :])
