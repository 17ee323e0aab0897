"""torchao: 4-bit weights in its tile-packed int4 layout, on PyTorch's tinygemm kernel.

torchao had FP6-LLM's kernel, with E3M2 weights, up to 0.15; it was removed in 0.16
(github.com/pytorch/ao/pull/3520), and the releases that have it load only with torch 2.9. The
remaining low-bit weight format on CUDA without another package is `Int4TilePackedTo4dTensor`: 4-bit
codes with a BF16 scale and zero point per group, multiplied by BF16 activations. As torchao does,
the weights are padded when they are packed, and activations at each call.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.external.declare import linear_kernel
from flexq_bench.kernels.external_packages.packages import TORCHAO, load

_GROUP, _OFFSET = 128, 8  # the kernel reads code c in 0 … 15 as c - 8
_INNER_TILES = 8  # of k in a packed tile, as in torchao
_N_MULTIPLE, _K_MULTIPLE = 8, 1024
_BF16_BITS = 8


def _tiles(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = -codes.shape[0] % _N_MULTIPLE
    groups = -scales.shape[1] % (_K_MULTIPLE // _GROUP)
    padding = (0, -codes.shape[1] % _K_MULTIPLE, 0, rows)
    padded = torch.nn.functional.pad(codes, padding).int() + _OFFSET
    pairs = (padded[:, ::2] << 4 | padded[:, 1::2]).to(torch.uint8).contiguous()
    scales = torch.nn.functional.pad(scales, (0, groups, 0, rows))
    join = load(TORCHAO, "quantization.utils").pack_tinygemm_scales_and_zeros
    tiles = torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_TILES)
    return tiles, join(scales, torch.zeros_like(scales))


@linear_kernel(
    "torchao-w4a16",
    weight=f"int4/{_GROUP}@bf16",
    activation="bf16",
    backends=["cuda"],
    prepare_weight=_tiles,
    returns=True,
    rounds_to=_BF16_BITS,
    package=TORCHAO,
    version=2,  # activations were FP16, and the result was copied
)
def tinygemm(
    x: torch.Tensor, tiles: torch.Tensor, scales: torch.Tensor, *, n: int, k: int
) -> torch.Tensor:
    """Multiply by torchao's tile-packed int4 weights, BF16 activations and results."""
    if missing := -k % _K_MULTIPLE:
        x = torch.nn.functional.pad(x, (0, missing))
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x, tiles, _GROUP, scales)
    return y[:, :n]
