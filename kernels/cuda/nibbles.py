"""4-bit weights for int8 tensor cores: their layout, and kernels with one INT8 scale a token.

`dgq-w4a8` is DGQ's (arXiv 2310.04836): codes with zero points, INT8 scales of groups, FP16 scales
of output features. A weight is widened to int8 *with* its group's scale, so the tensor core sums
integers over all of K and everything is scaled once. `group-w4a8` is what the paper compares it
with: symmetric codes with an FP16 scale per group, whose sums are converted and scaled one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.contract import KernelSpec, OperandFormat, PackedOperand, checked_scales
from kernels.cuda.dense import padded
from kernels.cuda.imma import ImmaGemm
from kernels.cuda.imma_configs import (
    GROUP,
    MMA_ROWS,
    MMA_TOKENS,
    MOST_FEW,
    AnyImmaConfig,
    ImmaConfig,
    TileFormat,
    every_few_nibbles,
    few_nibbles,
)
from kernels.cuda.rows import INT8_ROWS
from kernels.cuda.weight_only import tile_scales
from kernels.errors import ShapeError
from kernels.formats import Operand
from kernels.formats.dual_grained import int8_values
from kernels.formats.symmetric import STATIC_SCALE, quantize_static
from kernels.runtime.gpu import current_gpu
from kernels.runtime.nvrtc import Build
from workloads.gemm import GemmWorkload

_BITS, _MASK = 4, 15
_SHORT_K = 5120
_LONGEST_K = (2**31 - 1) // 2**14  # products of two int8 codes that an int32 holds


def tile_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """Nibbles [N,K], their lowest four bits, as the W_BITS 4 tiles of csrc/imma_layout.cuh.

    uint8 [N/16, K/128, bytes of a tile], both rounded up with zeros.
    """
    row_tiles, groups = -(-nibbles.shape[0] // MMA_ROWS), -(-nibbles.shape[1] // GROUP)
    whole = padded(nibbles.to(torch.uint8) & _MASK, row_tiles * MMA_ROWS, groups * GROUP)
    # A row is half·8 + of_lane; a k of a group is 32·quarter + 16·vector + 8·word + 4·upper + byte.
    split = whole.view(row_tiles, 2, 8, groups, 4, 2, 2, 2, 4)
    in_bytes = split[..., 0, :] | split[..., 1, :] << _BITS
    tile, half, of_lane, group, quarter, vector, word, byte = range(8)
    ordered = in_bytes.permute(tile, group, vector, of_lane, quarter, word, half, byte)
    return ordered.reshape(row_tiles, groups, -1)


def config_for(gemm: GemmWorkload, sms: int) -> ImmaConfig | None:
    """What won most often on an H200 among shapes with so many row tiles for each SM.

    None: for more than 8 tokens. Weights that cost more to widen want more warps than flexq-imma's.
    """
    if gemm.m > MMA_TOKENS:
        return None
    row_tiles_an_sm = gemm.n / MMA_ROWS / sms
    if row_tiles_an_sm > 8:
        return ImmaConfig(2, 4, 2, 1, 1, 1)
    if row_tiles_an_sm > 5:
        return ImmaConfig(2, 8, 2, 1, 0, 1)
    if row_tiles_an_sm > 4 or (row_tiles_an_sm > 2 and gemm.k <= _SHORT_K):
        return ImmaConfig(1, 8, 2, 1, 0, 1)
    return ImmaConfig(2, 16, 2, 1, 0, 1) if row_tiles_an_sm > 2 else ImmaConfig(1, 16, 3, 1, 0, 1)


class _TokenScaledGemm(ImmaGemm):
    """What both have in common: activations in INT8 with one dynamic scale a token."""

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        INT8_ROWS.quantize(x, packed.buffers["codes"], packed.buffers["scales"])

    def in_mma_order(self, m: int) -> bool:
        return False

    def configs(self, m: int) -> Sequence[AnyImmaConfig]:
        return few_nibbles(m)

    def every_config(self) -> Sequence[AnyImmaConfig]:
        return every_few_nibbles()

    def default_config(self, gemm: GemmWorkload) -> AnyImmaConfig:
        sms = current_gpu().sms
        return config_for(gemm, sms) or super().default_config(gemm)

    def packing_builds(self) -> Sequence[Build]:
        return [INT8_ROWS.build]


class GroupScaledGemm(_TokenScaledGemm):
    """`group-w4a8`."""

    tiles = TileFormat(_BITS, a_grouped=False)
    spec = KernelSpec(
        name="group-w4a8",
        backend="cuda",
        weight=OperandFormat(_BITS, GROUP),
        activation=OperandFormat(8),
        summary="4-bit weights with an FP16 scale per group, sums of groups converted one by one",
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        buffers = {"tiles": tile_nibbles(weight.values), "scales": tile_scales(scales)}
        return PackedOperand(buffers, weight.rows, weight.k)

    def builds(self) -> Sequence[Build]:
        """The largest of few and of more tokens; `dgq-w4a8` has every one of the same source."""
        return [few_nibbles(m)[-1].build(self.tiles) for m in (1, MOST_FEW)]


class DualGrainedGemm(_TokenScaledGemm):
    """`dgq-w4a8`, and `[static]` with one scale for all activations.

    The packer refuses weights that don't fit int8 with their group's scale.
    """

    tiles = TileFormat(_BITS, dual_grained=True, a_grouped=False)

    def __init__(self, variant: str = "") -> None:
        self.spec = KernelSpec(
            name="dgq-w4a8",
            variant=variant,
            backend="cuda",
            weight=OperandFormat(_BITS, GROUP, kind="dual"),
            activation=OperandFormat(8),
            summary="DGQ: 4-bit weights made int8 with their group's scale, one integer sum over K"
            + (", activations with one static scale" if variant else ""),
        )

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        return quantize_static(x, 8) if self.spec.variant else super().quantize_activation(x)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        """With a `static` scale where there is one: a layer's own may be written there."""
        packed = super().empty_activation(m, k, device)
        if not self.spec.variant:
            return packed
        static = torch.full((1,), STATIC_SCALE, dtype=torch.float32, device=device)
        return PackedOperand(packed.buffers | {"static": static}, m, k)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        b = packed.buffers
        INT8_ROWS.quantize(x, b["codes"], b["scales"], b.get("static"))

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        int8_values(weight)
        if weight.k > _LONGEST_K:
            raise ShapeError(
                f"{self.spec.label} sums in int32, so K may be at most {_LONGEST_K:,}, got "
                f"{weight.k:,}: pick group-w4a8, or split the layer along K"
            )
        assert weight.zero_points is not None  # int8_values has looked
        assert weight.row_scales is not None  # checked_scales has
        # Past K, zero: as a code, that is what the zero point takes away again.
        zeros = weight.zero_points[:, -1:].to(torch.int8)
        past = (-zeros).expand(-1, -weight.k % GROUP)
        pairs = torch.stack([scales.to(torch.int8), weight.zero_points], dim=2)
        buffers = {
            "tiles": tile_nibbles(torch.cat([weight.values, past], dim=1)),
            "scales": _tile_pairs(pairs),
            "features": weight.row_scales[:, 0].contiguous(),
        }
        return PackedOperand(buffers, weight.rows, weight.k)


def _tile_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Scale and zero point int8 [N, K/128, 2] as [N/16, K/128, 8, 2, 2]: rows 8 apart together."""
    rows, groups, _ = pairs.shape
    row_tiles = -(-rows // MMA_ROWS)
    whole = padded(pairs.reshape(rows, -1), row_tiles * MMA_ROWS, groups * 2)
    return whole.view(row_tiles, 2, 8, groups, 2).permute(0, 3, 2, 1, 4).contiguous()
