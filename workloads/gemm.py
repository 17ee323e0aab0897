"""GEMM workload: one linear layer at one number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from flexq_bench.workloads.errors import WorkloadError

# Larger dimensions are typing errors: the widest published layer is under 2^18.
MAX_DIMENSION = 1 << 24
SCALE_BYTES = 2  # scales are FP16


@dataclass(frozen=True, slots=True, order=True)
class GemmWorkload:
    """One linear layer, Y[M,N] = X[M,K] · W[N,K]^T: m tokens, n output and k input features.

    Raises WorkloadError if a dimension is not in 1 … 2^24.
    """

    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for name, value in (("M", self.m), ("N", self.n), ("K", self.k)):
            if not 1 <= value <= MAX_DIMENSION:
                raise WorkloadError(
                    f"{name} must be from 1 to {MAX_DIMENSION:,}, got {value:,}: "
                    "M counts tokens, N output features, K input features"
                )

    @property
    def operations(self) -> int:
        """Multiplications and additions of the GEMM, 2·M·N·K."""
        return 2 * self.m * self.n * self.k

    def weight_bytes(self, bits: int, group: int | None) -> int:
        """Return the bytes of the packed weights and their FP16 scales, which the floor reads.

        bits: per weight. group: values of k that share a scale; None: one scale per row for
        integer weights of up to 8 bits, no scales for 16-bit weights.
        """
        codes = self.n * ((self.k * bits + 7) // 8)
        if group is not None:
            return codes + self.n * -(-self.k // group) * SCALE_BYTES
        return codes + (self.n * SCALE_BYTES if bits <= 8 else 0)
