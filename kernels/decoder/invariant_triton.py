"""Attention of prompts whose order of additions depends on the row alone, in Triton.

In a file of its own because Triton parses the source. A program computes a tile of tokens of one
head; cached tokens follow in tiles from the first one on. Tiles have one shape, and those past a
token's own position add nothing to its sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton resolves each annotation of a kernel as a value of its own language.

import triton
import triton.language as tl


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
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Write the attention of one head of a tile of tokens to the cached tokens up to their own.

    cache: FP16 [2, slots, kv_heads, capacity, head_dim]; layer: elements of its keys. width:
    head_dim rounded up to a power of two.
    """
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    token, at_dim = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, width)
    slot = tl.load(slot_pointer + row).to(tl.int64)
    is_token, is_dim = token < tokens, (at_dim < head_dim)[None, :]
    last = tl.load(position_pointer + row * tokens + token, mask=is_token, other=0).to(tl.int32)
    place = ((row * tokens + token) * heads + head)[:, None] * head_dim + at_dim[None, :]
    query = tl.load(query_pointer + place, mask=is_token[:, None] & is_dim, other=0.0)
    keys = cache_pointer + (slot * kv_heads + head // (heads // kv_heads)) * capacity * head_dim
    largest, total = tl.full((block,), float("-inf"), tl.float32), tl.zeros((block,), tl.float32)
    sums = tl.zeros((block, width), tl.float32)
    for start in range(0, tl.max(last, axis=0) + 1, block):
        at = start + tl.arange(0, block)
        places = at[:, None] * head_dim + at_dim[None, :]
        inside = (at < capacity)[:, None] & is_dim
        k = tl.load(keys + places, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(k)) * scale
        scores = tl.where(at[None, :] <= last[:, None], scores, float("-inf"))
        next_largest = tl.maximum(largest, tl.max(scores, axis=1))
        fade = tl.exp(largest - next_largest)
        shares = tl.exp(scores - next_largest[:, None])
        v = tl.load(keys + layer + places, mask=inside, other=0.0)
        sums = tl.dot(shares.to(tl.float16), v, sums * fade[:, None])
        total = total * fade + tl.sum(shares, axis=1)
        largest = next_largest
    result = (sums / total[:, None]).to(tl.float16)
    tl.store(out_pointer + place, result, mask=is_token[:, None] & is_dim)
