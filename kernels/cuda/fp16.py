"""`fp16`: the faster of cuBLASLt and, for few tokens, csrc/fp16/few_tokens.cu.

Both read the same row-major weights. For few tokens cuBLAS reads 50 to 280 MB of weights at 60 to
90 % of the memory bandwidth of an H200: as a baseline it alone would overstate speed-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexq_bench.kernels.contract import Config, GemmCall, KernelSpec
from flexq_bench.kernels.cuda.cublas.dense import Fp16Gemm
from flexq_bench.kernels.formats import FP16
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.workloads.gemm import GemmWorkload

_OCTET, _TILE_TOKENS = 8, 8  # rows of an octet, tokens of a column tile
_FRAGMENT_BYTES = 8 * 32  # partial sums of a warp for an octet and 8 tokens
# (octets, warps, stages, step_k, late, blocks_an_sm): of about 100 configurations those that were
# fastest for a layer in decode steps of LLaMA-13B on an H200.
_CHOICES = (
    (2, 4, 4, 128, 0, 0),
    (2, 8, 2, 128, 0, 0),
    (2, 8, 2, 128, 1, 0),
    (3, 8, 2, 128, 0, 0),
    (3, 16, 2, 64, 0, 0),
    (3, 16, 4, 64, 0, 1),
    (5, 4, 5, 64, 0, 2),
    (5, 8, 2, 128, 0, 1),
    (5, 8, 4, 64, 0, 0),
    (5, 16, 2, 64, 0, 0),
    (7, 8, 3, 64, 0, 1),
    (9, 8, 2, 64, 0, 1),
)
_DEFAULT = (2, 8, 2, 128, 0, 0)
_FEW_ROWS = (5, 16, 2, 64, 0, 0)  # if no SM gets more than one such block
_MAX_TOKENS = 16  # of few_tokens.cu: for more it reads weights twice, and cuBLAS is faster


@dataclass(frozen=True, slots=True)
class FewTokensConfig(Config):
    """Configuration of csrc/fp16/few_tokens.cu.

    octets: of rows per block; warps: of a block, which split K; stages: of each lane's ring buffer;
    step_k: k per stage; late: 1 if the next kernel may start only after the last loads of weights;
    blocks_an_sm: persistent blocks per SM, 0: blocks are not persistent; col_tiles: of 8 tokens per
    block.
    """

    octets: int
    warps: int
    stages: int
    step_k: int
    late: int
    blocks_an_sm: int
    col_tiles: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block in bytes: ring buffers, and sums that may alias them."""
        ring = self.stages * self.octets * _OCTET * self.step_k * 2
        sums = self.octets * self.col_tiles * _FRAGMENT_BYTES
        per_warp = ring + 2 * sums if self.blocks_an_sm else max(ring, sums)
        return self.warps * per_warp

    def grid(self, m: int, n: int, sms: int) -> tuple[int, int, int]:
        """Return the grid: blocks along rows, and along tokens."""
        row_tiles, octets = -(-n // (_OCTET * self.octets)), -(-n // _OCTET)
        blocks = min(self.blocks_an_sm * sms, octets) if self.blocks_an_sm else row_tiles
        return blocks, -(-m // (_TILE_TOKENS * self.col_tiles)), 1

    @property
    def build(self) -> Build:
        """Return the build of csrc/fp16/few_tokens.cu for this configuration."""
        block = Block("fp16_few", self.warps * 32, self.shared_bytes)
        defines = self.defines()
        defines["PERSISTENT"] = int(defines.pop("BLOCKS_AN_SM") > 0)
        return Build.of("fp16/few_tokens.cu", block=block, **defines)


class FastestFp16Gemm(Fp16Gemm):
    """`fp16`."""

    spec = KernelSpec(
        name="fp16",
        backend="cuda",
        weight=FP16,
        activation=FP16,
        summary="dense FP16: cuBLASLt, or our own kernel for few tokens",
        overlaps_launches=True,
    )

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        allowed = current_gpu().block_shared_bytes
        few_tokens = [c for c in _few_tokens_configs(gemm.m) if c.shared_bytes <= allowed]
        return [*super().candidates(gemm), *few_tokens]

    def default_config(self, gemm: GemmWorkload) -> Config | None:
        if gemm.m > _MAX_TOKENS:
            return super().default_config(gemm)
        gpu, few_rows = current_gpu(), FewTokensConfig(*_FEW_ROWS, 1)
        is_small = gemm.n <= few_rows.octets * _OCTET * gpu.sms and gemm.m <= _TILE_TOKENS
        if is_small and few_rows.shared_bytes <= gpu.block_shared_bytes:
            return few_rows
        return FewTokensConfig(*_DEFAULT, _col_tiles(gemm.m))

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        chosen = config or self.default_config(shape)
        if not isinstance(chosen, FewTokensConfig):
            super().compute(call, chosen)
            return
        weights, values = w.buffers["values"], x.buffers["values"]
        load_function(chosen.build, "fp16_few").launch(
            chosen.grid(shape.m, shape.n, current_gpu().sms),
            chosen.warps * 32,
            (weights, values, bias, out, shape.m, shape.n, shape.k, weights.shape[1]),
            shared_bytes=chosen.shared_bytes,
            overlap_previous=True,
        )

    def builds(self) -> Sequence[Build]:
        return [config.build for m in (1, _MAX_TOKENS) for config in _few_tokens_configs(m)]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config or self.default_config(gemm)
        return [chosen.build] if isinstance(chosen, FewTokensConfig) else []


def _few_tokens_configs(m: int) -> list[FewTokensConfig]:
    if m > _MAX_TOKENS:
        return []
    configs = [FewTokensConfig(*choice, _col_tiles(m)) for choice in _CHOICES]
    # The sums of two column tiles do not fit next to the ring buffers of persistent blocks.
    return [c for c in configs if c.col_tiles == 1 or not c.blocks_an_sm]


def _col_tiles(m: int) -> int:
    return 1 if m <= _TILE_TOKENS else 2
