"""Kernels that convert weights exactly to FP16 in registers (csrc/weight_only/gemm.cu).

They accumulate in FP32 on FP16 tensor cores. Activations are FP16, or codes with one scale per
token, which FP16 holds exactly. KERNELS lists those of integers, of which `w4a16[zeros]` has the
zero points of AWQ (arXiv 2306.00978); floats are in minifloat.py and microscaling.py. Codes of 6
bits are stored in bytes, so that `w6a16` reads as much memory as 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import (
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    Packing,
    checked_scales,
)
from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.cublas.rows import CODES_AS_HALVES
from flexq_bench.kernels.cuda.half_activations import HalfActivationKernel
from flexq_bench.kernels.cuda.timed_choice import TimedChoice
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.runtime.gpu import current_device, current_gpu
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.workloads.case import parse_kernel_label
from flexq_bench.workloads.gemm import GemmWorkload

INT8_WEIGHTS = TimedChoice("int8-weights")
INT4_WEIGHTS = TimedChoice("int4-weights")
STEP_K = 128  # of a tile
MMA_ROWS, MMA_TOKENS = 16, 8
_OF_SOURCE = {("ROW_GROUPS", 1), ("SHARED_X", 0)}  # the source's defaults
_STEP_BYTES = 2 * STEP_K * MMA_TOKENS  # activations of a step, of a column tile
_FRAGMENT_BYTES = 16 * 32  # partial sums of a warp for 16 rows and 8 tokens
COL_TILES = (1, 2, 4)  # of 8 tokens per block; further tokens are computed by further blocks
# Kernels whose builds are all listed: one for each way to convert weights and to scale.
_USUAL = ("w8a16", "w4a16", "fp6-w6a16", "mxfp4-w4a16", "mxfp6-w6a16", "nvfp4-w4a16")
# Formats of weights and activations by label.
KERNELS = {
    "w8a16": ("int8/row", "fp16"),
    "w8a16[groups]": ("int8/128", "fp16"),
    "w8a16[g64]": ("int8/64", "fp16"),
    "w6a16": ("int6/128", "fp16"),
    "w6a16[g64]": ("int6/64", "fp16"),
    "w4a16": ("int4/128", "fp16"),
    "w4a16[g64]": ("int4/64", "fp16"),
    "w4a16[g32]": ("int4/32", "fp16"),
    "w4a16[zeros]": ("uint4/128", "fp16"),
    "w4a16[zeros,g64]": ("uint4/64", "fp16"),
    "w4a16[zeros,g32]": ("uint4/32", "fp16"),
    "w4afp8": ("int4/128", "fp8/row"),
}


@dataclass(frozen=True, slots=True)
class WeightOnlyConfig(Config):
    """Configuration of csrc/weight_only/gemm.cu.

    row_tiles: of 16 rows per block; warps: of a block, which split K; stages: of each warp's ring
    buffer; k_split: blocks of a cluster that split K of a row tile; late: 1 if the next kernel may
    start only after the loop over K, 2 if once the previous one has ended; col_tiles: of 8 tokens
    per block; row_groups: groups of warps with row_tiles each, which share k; shared_x: 1 if
    activations are copied to shared memory, once for the warps that share k (blocks of codes below
    8 bits only).
    """

    row_tiles: int
    warps: int
    stages: int
    k_split: int
    late: int
    col_tiles: int
    row_groups: int = 1
    shared_x: int = 0


Choice = tuple[int, int, int, int, int]
# (row_tiles, warps, stages, k_split, late) by column tiles. For one column tile: a greedy selection
# from 40 (`benchmarks/kernels/heuristic.py select`), on average within 0.2 % of the best of all 40
# on the random shapes of examples/h200/w8a16-times.json.gz and w4a16-times.json.gz. None spills.
_CHOICES: dict[int, tuple[Choice, ...]] = {
    1: (
        (1, 8, 2, 1, 0),
        (1, 8, 2, 1, 1),
        (1, 8, 2, 2, 1),
        (1, 16, 2, 1, 0),
        (1, 16, 3, 1, 0),
        (2, 8, 2, 1, 0),
        (2, 8, 2, 1, 1),
        (2, 8, 2, 2, 1),
        (2, 16, 2, 1, 0),
        (2, 16, 2, 1, 1),
        (3, 4, 3, 1, 0),
        (3, 8, 2, 1, 0),
        (3, 8, 2, 1, 1),
        (3, 16, 2, 1, 0),
        (4, 8, 2, 1, 0),
        (4, 8, 2, 1, 1),
        (4, 8, 2, 2, 1),
        (4, 8, 3, 1, 0),
        (4, 16, 2, 1, 0),
        (5, 8, 2, 1, 0),
    ),
    2: (
        (1, 4, 3, 1, 0),
        (1, 8, 2, 1, 0),
        (1, 16, 2, 1, 0),
        (2, 4, 2, 1, 0),
        (2, 8, 2, 1, 0),
        (2, 4, 2, 2, 0),
        (4, 8, 2, 1, 0),
    ),
    4: (
        (1, 4, 3, 1, 0),
        (1, 8, 2, 1, 0),
        (1, 16, 2, 1, 0),
        (2, 4, 2, 1, 0),
        (2, 8, 2, 1, 0),
        (2, 4, 2, 2, 0),
    ),
}


# Configurations in which some kernels with scales in tiles spill registers.
_SPILLING = (
    WeightOnlyConfig(2, 8, 2, 2, 1, 1),
    WeightOnlyConfig(4, 8, 2, 1, 0, 2),
    WeightOnlyConfig(1, 16, 2, 1, 0, 4),
    WeightOnlyConfig(2, 4, 2, 2, 0, 4),
)


def tile_weights(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Reorder codes int8 [N,K] into the tiles of csrc/weight_only/layout.cuh.

    Tiles are uint8 [N/16, K/128, bytes of a tile], both rounded up; codes past the edges are zero.
    bits: 8 or 4.
    """
    row_tiles, steps = -(-codes.shape[0] // MMA_ROWS), -(-codes.shape[1] // STEP_K)
    padded_matrix = padded(codes, row_tiles * MMA_ROWS, steps * STEP_K)
    biased = (padded_matrix.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    # A row is half·8 + lane_row; a k of a step is 32·vector + 8·quarter + 4·odd + 2·pair + value.
    split = biased.view(row_tiles, 2, 8, steps, 4, 4, 2, 2, 2)
    if bits == 8:
        tile, half, lane_row, step, vector, quarter, odd, pair, value = range(9)
        ordered = split.permute(tile, step, vector, lane_row, quarter, odd, pair, half, value)
        return ordered.reshape(row_tiles, steps, -1)
    # The two halves of the rows are the nibbles of a byte; a lane loads two vectors of k at once.
    packed = (split[:, 0] | split[:, 1] << 4).view(row_tiles, 8, steps, 2, 2, 4, 2, 2, 2)
    tile, lane_row, step, load, vector, quarter, odd, pair, value = range(9)
    ordered = packed.permute(tile, step, load, lane_row, quarter, vector, odd, value, pair)
    return ordered.reshape(row_tiles, steps, -1)


def tile_scales(scales: torch.Tensor, blocks: int = 1) -> torch.Tensor:
    """Reorder FP16 scales [N, K/group] to [N/16, K/128, 8, blocks · 2]: rows r and r + 8 adjacent.

    blocks: groups of a tile.
    """
    row_tiles, steps = -(-scales.shape[0] // MMA_ROWS), -(-scales.shape[1] // blocks)
    padded_matrix = padded(scales, row_tiles * MMA_ROWS, steps * blocks)
    split = padded_matrix.view(row_tiles, 2, 8, steps, blocks)
    return split.permute(0, 3, 2, 4, 1).flatten(3).contiguous()


def tile_scales_and_offsets(
    scales: torch.Tensor, zeros: torch.Tensor, blocks: int = 1
) -> torch.Tensor:
    """Combine FP16 scales and integer zero points [N, K/group] to [N/16, K/128, 8, blocks · 4].

    A block has the scales of rows r and r + 8, 1024 + z of row r and -(64 + z) of row r + 8.
    """
    z = padded(zeros, -(-zeros.shape[0] // MMA_ROWS) * MMA_ROWS, zeros.shape[1]).half()
    shape = (z.shape[0] // MMA_ROWS, -(-z.shape[1] // blocks), 8, blocks, 2)
    z_pairs = tile_scales(z, blocks).view(*shape)
    offsets = torch.stack((1024 + z_pairs[..., 0], -(64 + z_pairs[..., 1])), dim=-1)
    pairs = tile_scales(scales, blocks).view(*shape)
    return torch.cat((pairs, offsets), dim=-1).flatten(3).contiguous()


class WeightOnlyGemm(HalfActivationKernel):
    """A kernel of KERNELS. timed: cases from which default_config chooses."""

    timed: TimedChoice
    k_multiple = 8  # rows of X are aligned to 16 bytes

    def __init__(self, label: str, weight: str, activation: str = "fp16") -> None:
        name, variant = parse_kernel_label(label)
        w, x = NumberFormat.parse(weight), NumberFormat.parse(activation)
        self.timed = INT4_WEIGHTS if w.bits == 4 else INT8_WEIGHTS
        self.spec = KernelSpec(
            name=name,
            variant=variant,
            backend="cuda",
            weight=w,
            activation=x,
            summary=f"{w.name} weights and {x.name} activations on FP16 tensor cores",
            overlaps_launches=True,
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        codes = weight.values
        if weight.zero_points is not None:
            codes = codes - (1 << (self.spec.weight.bits - 1))  # stored like signed codes
        tiles = self.tile(codes)
        if self.spec.weight.group is None:
            buffers = {"tiles": tiles, "scales": scales[:, 0].contiguous()}
        elif self.spec.weight.group == STEP_K:
            buffers = {"tiles": tiles, "scales": self.tile_blocks(weight)}
        else:
            blocks = self.tile_blocks(weight).view(torch.uint8).view(*tiles.shape[:2], -1)
            buffers = {"tiles": torch.cat([tiles, blocks], dim=2)}
        return PackedOperand(buffers, weight.rows, weight.k)

    def tile_blocks(self, weight: Operand) -> torch.Tensor:
        """Reorder the scales, and zero points, of groups for csrc/weight_only/layout.cuh."""
        assert weight.scales is not None  # checked by pack_weight
        blocks = STEP_K // weight.group_length
        if weight.zero_points is not None:
            return tile_scales_and_offsets(weight.scales, -weight.zero_points, blocks)
        return tile_scales(weight.scales, blocks)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        packed = super().empty_activation(m, k, device)
        if self.spec.activation.is_dense:
            return packed
        group = self.spec.activation.group
        shape = (m,) if group is None else (-(-k // group), -(-m // MMA_TOKENS) * MMA_TOKENS)
        return packed.with_buffers(scales=torch.zeros(shape, dtype=torch.float32, device=device))

    def pack_activation(self, x: Operand) -> PackedOperand:
        if self.spec.activation.is_dense:
            return super().pack_activation(x)
        scales = checked_scales(x, self.spec.activation)
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        packed.buffers["values"][: x.rows, : x.k] = x.values.half()
        packed.buffers["scales"][..., : x.rows] = scales.T if x.group else scales[:, 0]
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        activation, buffers = self.spec.activation, packed.buffers
        if activation.is_dense:
            super().activate(x, packed)
            return
        rows = CODES_AS_HALVES[activation.kind]
        if activation.group is None:
            rows.quantize(x, buffers["values"], buffers["scales"])
        else:
            rows.quantize_groups(x, buffers["values"], buffers["scales"], activation.group)

    def activated(self, x: torch.Tensor, packed: PackedOperand) -> PackedOperand:
        if self.spec.activation.is_dense:
            return super().activated(x, packed)
        self.activate(x, packed)
        return packed

    def tile(self, values: torch.Tensor) -> torch.Tensor:
        """Reorder codes [N,K] into the tiles of csrc/weight_only/layout.cuh."""
        return tile_weights(values, self.stored_bits)

    @property
    def stored_bits(self) -> int:
        """Bits of a code in memory: those of floats, and 4 or 8 for integers."""
        weight = self.spec.weight
        return weight.bits if weight.kind == "float" or weight.bits == 4 else 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a tile's scales that are stored with its codes."""
        weight = self.spec.weight
        if weight.group is None or weight.group == STEP_K:
            return 0
        scale_bytes = 2 if weight.scale == "fp16" else 1
        values = 2 if weight.kind == "asymmetric" else 1
        return MMA_ROWS * STEP_K // weight.group * scale_bytes * values

    def defines(self) -> dict[str, int]:
        """Return the defines common to all builds of this kernel."""
        weight = self.spec.weight
        defines = {"W_BITS": self.stored_bits, "GROUPED": int(weight.group is not None)}
        if weight.kind == "asymmetric":
            defines["ZEROS"] = 1
        if weight.group is not None and weight.group != STEP_K:
            defines["BLOCK_K"] = weight.group
        if not self.spec.activation.is_dense:
            defines["TOKEN_SCALES"] = 1 if self.spec.activation.group is None else 2
        return defines

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        c = config if isinstance(config, WeightOnlyConfig) else self.default_config(shape)
        blocks = -(-shape.n // (MMA_ROWS * c.row_tiles * c.row_groups)) * c.k_split
        chunks = -(-shape.m // (c.col_tiles * MMA_TOKENS))
        values = x.buffers["values"]
        build = self.build(c, **self.defines_for(w), **whole(c, shape.k))
        load_function(build, "weight_only").launch(
            (blocks, chunks, 1),
            c.warps * 32,
            (
                w.buffers["tiles"],
                w.buffers.get("scales"),
                values,
                bias,
                out,
                shape.m,
                shape.n,
                shape.k,
                values.shape[1],
                *(() if self.spec.activation.is_dense else (x.buffers["scales"],)),
            ),
            shared_bytes=self._shared_bytes(c),
            overlap_previous=True,
            cluster=c.k_split,
        )

    def packing(self, x: PackedOperand, config: Config | None) -> Packing | None:
        is_dense = self.spec.activation.is_dense
        return Packing("halves", 16, x.buffers["values"]) if is_dense else None

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        gpu = current_gpu()
        return [
            c
            for c in self.configs(tiles_for(gemm.m))
            if self._shared_bytes(c) <= gpu.block_shared_bytes and self.build(c).runs_on(gpu.arch)
        ]

    def default_config(self, gemm: GemmWorkload) -> WeightOnlyConfig:
        can_run = [c for c in self.candidates(gemm) if isinstance(c, WeightOnlyConfig)]
        tiles = tiles_for(gemm.m)
        return self.timed.choose_few(can_run, gemm, current_device(), tiles)

    def builds(self) -> Sequence[Build]:
        """Return all builds of the usual kernels; of the others only the largest one."""
        if self.spec.label in _USUAL:
            configs = [c for tiles in COL_TILES for c in self.configs(tiles)]
        else:
            configs = self.configs(COL_TILES[-1])[-1:]
        ahead = [self.build(c, **whole(c, 1)) for c in configs if whole(c, 1)]
        return [*self._activation_builds(), *map(self.build, configs), *ahead]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config if isinstance(config, WeightOnlyConfig) else self.default_config(gemm)
        return [*self._activation_builds(), self.build(chosen, **whole(chosen, gemm.k))]

    def _activation_builds(self) -> Sequence[Build]:
        activation = self.spec.activation
        return [] if activation.is_dense else [CODES_AS_HALVES[activation.kind].build]

    def configs(self, col_tiles: int) -> list[WeightOnlyConfig]:
        """Return the configurations with this number of column tiles, for any GPU."""
        configs = [WeightOnlyConfig(*choice, col_tiles) for choice in _CHOICES[col_tiles]]
        return [config for config in configs if not self.block_bytes or config not in _SPILLING]

    def defines_for(self, _: PackedOperand) -> dict[str, int]:
        """Return defines of these weights that differ from the kernel's."""
        return {}

    def build(self, c: WeightOnlyConfig, **own: int) -> Build:
        """Return the build of csrc/weight_only/gemm.cu for a configuration."""
        return Build.of(
            "weight_only/gemm.cu",
            min_sm=90 if c.k_split > 1 else 80,
            block=Block("weight_only", c.warps * 32, self._shared_bytes(c)),
            **(self.defines() | own),
            **dict(c.defines().items() - _OF_SOURCE),
        )

    def _shared_bytes(self, c: WeightOnlyConfig) -> int:
        """Return the dynamic shared memory of a block of csrc/weight_only/gemm.cu in bytes."""
        tile = MMA_ROWS * STEP_K * self.stored_bits // 8 + self.block_bytes
        reduction = c.warps * c.row_tiles * c.col_tiles * _FRAGMENT_BYTES
        activations = c.shared_x * c.warps // c.row_groups * c.col_tiles * _STEP_BYTES
        ring = c.stages * (c.warps * c.row_tiles * tile + activations)
        # Of the other blocks of a cluster: sums of the fragments that this one stores, an mbarrier.
        fragments = -(-c.row_tiles * c.row_groups * c.col_tiles // c.k_split) * _FRAGMENT_BYTES
        received = (c.k_split - 1) * fragments + 16 if c.k_split > 1 else 0
        return max(reduction, ring) + received


def whole(c: WeightOnlyConfig, k: int) -> dict[str, int]:
    """Return the define of a build that loads all weights ahead, where late is 2 and they fit."""
    most = c.stages * c.k_split * (c.warps // c.row_groups) * STEP_K
    return {"WHOLE": 1} if c.late == 2 and c.shared_x and k <= most else {}


def tiles_for(m: int) -> int:
    """Return the tiles of 8 tokens per block, for m tokens."""
    return next((tiles for tiles in COL_TILES if m <= tiles * MMA_TOKENS), COL_TILES[-1])
