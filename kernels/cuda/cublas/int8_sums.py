"""W8A8 GEMMs without scales: int32 sums, which published comparisons time.

They are probes, not linear layers. `cublas-w8a8[gemmex-sums]` is the call that the FlexQ authors
time, `cublaslt-w8a8[sums]` is the time of a W8A8 layer by cuBLASLt without the scaling kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import Config, KernelSpec, PackedOperand, Probe, ProbeResult
from flexq_bench.kernels.cuda.cublas.cublaslt import LtConfig, lt_candidates, lt_problem
from flexq_bench.kernels.cuda.cublas.dense import INT8, PADDED_ROWS, Int8Gemm, padded
from flexq_bench.kernels.cuda.cublas.gemmex import (
    multiply_int8,
    padded_size,
    padded_tokens,
    transposed_codes,
)
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.workloads.gemm import GemmWorkload

_NOT_WRITTEN = -(2**31)  # differs from every sum of int8 products


class _SharedTokens(PackedOperand):
    """Operand whose clones share all buffers except the weights: only weights are read cold."""

    __slots__ = ()

    def clone(self) -> PackedOperand:
        return self.with_buffers(weights=self.buffers["weights"].clone())


class _Int8Sums(Probe):
    """Buffers `weights`, `tokens` and `sums` int32 [>= M, >= N], in the layout of the call."""

    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        generator = torch.Generator(device=device).manual_seed(seed)

        def draw(rows: int) -> torch.Tensor:
            return torch.randint(
                -128, 128, (rows, gemm.k), generator=generator, dtype=torch.int8, device=device
            )

        tokens, weights = self._pack(draw(gemm.m), draw(gemm.n))
        buffers = {"tokens": tokens, "weights": weights, "sums": self._sums(gemm, device)}
        return _SharedTokens(buffers, gemm.n, gemm.k)

    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        sums = operand.buffers["sums"].fill_(_NOT_WRITTEN)
        self.launch(operand, config)
        expected = self._expected(operand, config)  # float64 holds every one of these sums
        m, n = expected.shape
        wrong = int((sums.flatten()[: m * n].view(m, n) != expected).sum())
        return ProbeResult(wrong == 0, f"{wrong:,} of {m * n:,} sums are wrong")

    @abstractmethod
    def _pack(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert codes [M,K] and [N,K] to the layout of the call."""

    @abstractmethod
    def _sums(self, gemm: GemmWorkload, device: torch.device) -> torch.Tensor:
        """Allocate sums that are large enough for any configuration."""

    @abstractmethod
    def _expected(self, operand: PackedOperand, config: Config | None) -> torch.Tensor:
        """Compute every sum that the call writes in float64, independently of the library."""


class GemmExSums(_Int8Sums):
    """`cublas-w8a8[gemmex-sums]`: the published baseline alone."""

    spec = KernelSpec(
        name="cublas-w8a8",
        variant="gemmex-sums",
        backend="cuda",
        weight=NumberFormat(8),
        activation=NumberFormat(8),
        summary="cublasGemmEx int8 to int32, no scales: what FlexQ's authors time",
        stages=("gemm",),
    )

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        b = operand.buffers
        multiply_int8(b["tokens"], b["weights"], b["sums"])

    def _pack(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return padded_tokens(x), transposed_codes(w)

    def _sums(self, gemm: GemmWorkload, device: torch.device) -> torch.Tensor:
        return torch.empty(gemm.m, padded_size(gemm.n), dtype=torch.int32, device=device)

    def _expected(self, operand: PackedOperand, config: Config | None) -> torch.Tensor:
        return operand.buffers["tokens"].double() @ operand.buffers["weights"].double()


class LtSums(_Int8Sums):
    """`cublaslt-w8a8[sums]`: the GEMM of `cublaslt-w8a8` alone."""

    spec = KernelSpec(
        name="cublaslt-w8a8",
        variant="sums",
        backend="cuda",
        weight=NumberFormat(8),
        activation=NumberFormat(8),
        summary="cuBLASLt int8 to int32, no scales: a bound for any way to apply them",
        stages=("gemm",),
    )

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        b, c = operand.buffers, self._config(operand, config)
        n, k = b["weights"].shape
        problem = lt_problem(c.m_padded, n, k, INT8, torch.cuda.current_device())
        problem.run(b["weights"], b["tokens"], b["sums"], c.algorithm)

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return lt_candidates(gemm, _padded_k(gemm.k), INT8)

    def _pack(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = _padded_k(x.shape[1])
        return padded(x, max(x.shape[0], PADDED_ROWS), columns), padded(w, w.shape[0], columns)

    def _sums(self, gemm: GemmWorkload, device: torch.device) -> torch.Tensor:
        return torch.empty(max(gemm.m, PADDED_ROWS), gemm.n, dtype=torch.int32, device=device)

    def _expected(self, operand: PackedOperand, config: Config | None) -> torch.Tensor:
        tokens = operand.buffers["tokens"][: self._config(operand, config).m_padded]
        return tokens.double() @ operand.buffers["weights"].double().T

    def _config(self, operand: PackedOperand, config: Config | None) -> LtConfig:
        return config if isinstance(config, LtConfig) else LtConfig(0, len(operand.buffers["sums"]))


def _padded_k(k: int) -> int:
    return -(-k // Int8Gemm.k_multiple) * Int8Gemm.k_multiple
