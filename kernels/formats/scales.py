"""Types of scales.

- fp16, bf16, fp32: largest magnitude / largest code, rounded to nearest.
- e8m0: a power of two, 2^(floor(log2(largest magnitude)) - exponent of the largest code), at least
  2^-127 and at most 2^127 (OCP Microscaling Formats specification 1.0, section 6.3). Values beyond
  the largest code saturate.
- e4m3: relative to an FP32 scale of the whole matrix, which is its largest magnitude divided by
  448 · the largest code (NVFP4; NVIDIA, "Pretraining Large Language Models with NVFP4",
  arXiv 2509.25149, appendix B).

A scale is rounded once, from the exact quotient, and codes are computed with the *stored* scale. A
scale that rounds to zero gives codes of zero.
"""

from __future__ import annotations

import math

import torch

from flexq_bench.kernels.formats.floats import E4M3
from flexq_bench.kernels.formats.symmetric_quantization import finite_scales, quotients

SCALE_TYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}
_MAX_E8M0_EXPONENT = 127
# Quotients by scales of these types are never rounded across a tie in FP32 if values are FP16 or
# BF16; see `symmetric_quantization`.
NARROW_SCALES = ("fp16", "bf16", "e8m0")


def per_row(of_blocks: torch.Tensor, block_rows: int | None, rows: int) -> torch.Tensor:
    """Repeat values [row blocks, groups] for each row of a block: [rows, groups]."""
    if block_rows == 1:
        return of_blocks
    # FP8 as bytes, which torch can repeat on every device
    plain = of_blocks.view(torch.uint8) if of_blocks.itemsize == 1 else of_blocks
    repeated = plain.repeat_interleave(block_rows or rows, dim=0)[:rows]
    return repeated.view(of_blocks.dtype)


def block_scales(
    largest: torch.Tensor, kind: str, top: float, max_exponent: int, matrix_scale: float | None
) -> torch.Tensor:
    """Return the scales of blocks with these largest magnitudes, in their shape.

    kind: a key of SCALE_TYPES. top, max_exponent: the largest code's value, and the exponent of it.
    matrix_scale: of `e4m3`. Raises ValueError for a scale past the range of its type.
    """
    if kind == "e8m0":
        _, exponent = torch.frexp(largest)  # the mantissa is in [0.5, 1)
        shared = (exponent - 1 - max_exponent).clamp(-_MAX_E8M0_EXPONENT, _MAX_E8M0_EXPONENT)
        shared = shared.masked_fill(largest == 0, -_MAX_E8M0_EXPONENT)
        return (shared + _MAX_E8M0_EXPONENT).to(torch.uint8).view(torch.float8_e8m0fnu)
    if kind == "e4m3":
        assert matrix_scale is not None  # of every format with such scales
        relative = quotients(largest, top) / (matrix_scale or math.inf)
        return E4M3.nearest(relative).to(torch.float8_e4m3fn)
    return finite_scales(quotients(largest, top).to(SCALE_TYPES[kind]), top)


def matrix_scale_of(largest: float, top: float) -> float:
    """Return the FP32 scale of a matrix with this largest magnitude and with E4M3 block scales."""
    return float(torch.tensor(largest / (top * E4M3.largest), dtype=torch.float32, device="cpu"))
