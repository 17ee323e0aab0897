"""`fp16`: dense FP16 by cuBLASLt, or for few tokens by csrc/fp16_few.cu: whichever is faster.

Both read the same row-major weights. For a few tokens cuBLAS reads 50 to 280 MB of weights at 60 to
90 % of what an H200 delivers: a baseline that stopped there would flatter what is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from kernels.contract import Config, KernelSpec, OperandFormat, PackedOperand, check_gemm
from kernels.cuda.dense import Fp16Gemm
from kernels.runtime.gpu import current_gpu
from kernels.runtime.module import load_function
from kernels.runtime.nvrtc import Block, Build
from workloads.gemm import GemmWorkload

_BITS = 16
_ROWS, _TILE_TOKENS = 16, 8  # of a tile of rows, and of columns
_STEP_BYTES = 16 * 128 * 2  # csrc/fp16_few.cu: of a tile of rows and a step of k
_SHARE_BYTES = 16 * 32  # a warp's sums of 16 rows and 8 tokens
# (row_tiles, warps, stages, late): the fastest inside steps of LLaMA-13B on an H200.
_CHOICES = (
    (1, 4, 4, 0),
    (1, 4, 4, 1),
    (1, 8, 2, 0),
    (1, 8, 2, 1),
    (1, 16, 2, 0),
    (1, 16, 3, 0),
    (2, 4, 3, 0),
    (2, 8, 3, 0),
)
_DEFAULT = (1, 8, 2, 0)
_MOST_TOKENS = 32  # of our own kernel: beyond, cuBLAS has work enough to be as fast


@dataclass(frozen=True, slots=True)
class FewTokensConfig(Config):
    """row_tiles: of 16 rows a block; warps: of a block, which share out K; stages of each lane's
    ring; late: 1 where the next kernel may start only when the last weights are requested;
    col_tiles: of 8 tokens a block."""

    row_tiles: int
    warps: int
    stages: int
    late: int
    col_tiles: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the rings, or the sums."""
        return (
            self.row_tiles
            * self.warps
            * max(self.stages * _STEP_BYTES, self.col_tiles * _SHARE_BYTES)
        )

    @property
    def build(self) -> Build:
        """How csrc/fp16_few.cu is compiled for this configuration."""
        block = Block("fp16_few", self.warps * 32, self.shared_bytes)
        defines = {name.upper(): value for name, value in asdict(self).items()}
        return Build.of("fp16_few.cu", block=block, **defines)


class FastestFp16Gemm(Fp16Gemm):
    """`fp16`."""

    spec = KernelSpec(
        name="fp16",
        backend="cuda",
        weight=OperandFormat(_BITS),
        activation=OperandFormat(_BITS),
        summary="dense FP16: cuBLASLt, or our own kernel for few tokens",
    )

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        most = current_gpu().block_shared_bytes
        own = [config for config in _own_configs(gemm.m) if config.shared_bytes <= most]
        return [*super().candidates(gemm), *own]

    def default_config(self, gemm: GemmWorkload) -> Config | None:
        if gemm.m <= _MOST_TOKENS:
            return FewTokensConfig(*_DEFAULT, _col_tiles(gemm.m))
        return super().default_config(gemm)

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        shape = check_gemm(x, w, out)
        chosen = config or self.default_config(shape)
        if not isinstance(chosen, FewTokensConfig):
            super().gemm(x, w, out, bias=bias, config=chosen)
            return
        weights, values = w.buffers["values"], x.buffers["values"]
        chunks = -(-shape.m // (_TILE_TOKENS * chosen.col_tiles))
        load_function(chosen.build, "fp16_few").launch(
            (-(-shape.n // (_ROWS * chosen.row_tiles)), chunks, 1),
            chosen.warps * 32,
            (weights, values, bias, out, shape.m, shape.n, shape.k, weights.shape[1]),
            shared_bytes=chosen.shared_bytes,
            overlap_previous=True,
        )

    def builds(self) -> Sequence[Build]:
        return [config.build for m in (1, _MOST_TOKENS) for config in _own_configs(m)]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config or self.default_config(gemm)
        return [chosen.build] if isinstance(chosen, FewTokensConfig) else []


def _own_configs(m: int) -> list[FewTokensConfig]:
    if m > _MOST_TOKENS:
        return []
    return [FewTokensConfig(*choice, _col_tiles(m)) for choice in _CHOICES]


def _col_tiles(m: int) -> int:
    return 1 if m <= _TILE_TOKENS else 2
