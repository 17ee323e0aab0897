"""GEMM workload: one linear layer at one number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.operation import MAX_DIMENSION, packed_bytes


@dataclass(frozen=True, slots=True, order=True)
class GemmWorkload:
    """One linear layer, Y[M,N] = X[M,K] · W[N,K]^T: m tokens, n output and k input features.

    Raises WorkloadError if a dimension is not in 1 … 2^24.
    """

    m: int
    n: int
    k: int
    operation: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        for name, value in (("M", self.m), ("N", self.n), ("K", self.k)):
            if not 1 <= value <= MAX_DIMENSION:
                raise WorkloadError(
                    f"{name} must be from 1 to {MAX_DIMENSION:,}, got {value:,}: "
                    "M counts tokens, N output features, K input features"
                )

    @property
    def values(self) -> tuple[tuple[str, Value], ...]:
        """The parameters by name."""
        return (("m", self.m), ("n", self.n), ("k", self.k))

    @property
    def key(self) -> str:
        """Part of a case's key: `m1n4096k4096`."""
        return f"m{self.m}n{self.n}k{self.k}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of the GEMM, 2·M·N·K."""
        return 2 * self.m * self.n * self.k

    def weight_bytes(self, bits: int, group: int | None) -> int:
        """Return the bytes of the weights and their scales, as of `packed_bytes`."""
        return packed_bytes(self.n, self.k, bits, group)
