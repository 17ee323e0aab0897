"""The Triton kernel behind `fused`: a file of its own, because Triton reads its source."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton resolves each annotation of a kernel as a value of its own language.

import triton
import triton.language as tl


@triton.jit
def in_steps(x, step, together: tl.constexpr, block: tl.constexpr):
    """x [together, block] in steps [together] of its rows, as it is and rounded; step 0: zeros.

    Adding and taking away 1.5 · 2^23 rounds half to even: codes are far smaller than that.
    """
    divisor = tl.where(step == 0.0, float("inf"), step)
    unit = tl.div_rn(x, tl.broadcast_to(divisor[:, None], (together, block)))
    return unit, (unit + 12582912.0) - 12582912.0


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
    together: tl.constexpr,
):
    """A group of several rows: code times scale, and the scale, as formats.symmetric has it."""
    row = tl.program_id(0) * together + tl.arange(0, together)
    place = tl.arange(0, block)
    column = tl.program_id(1) * length + place
    inside = (row < rows)[:, None] & ((place < length) & (column < k))[None, :]
    start = row.to(tl.int64)
    x = tl.load(x_pointer + start[:, None] * stride + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    missing = tl.sum((x != x).to(tl.int32), axis=1)  # tl.max passes over NaN
    largest = tl.where(missing > 0, float("nan"), largest)
    scale = tl.div_rn(largest * clip, highest).to(tl.float16)
    factor = scale.to(tl.float32)
    _, nearest = in_steps(x, factor, together, block)
    code = tl.minimum(tl.maximum(nearest, lowest), highest)
    tl.store(
        rounded_pointer + start[:, None] * k + column[None, :], code * factor[:, None], mask=inside
    )
    tl.store(scale_pointer + start * groups + tl.program_id(1), scale, mask=row < rows)
