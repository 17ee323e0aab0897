"""A probe as the subject of a measurement."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import Config, KernelSpec, PackedOperand, Probe
from flexq_bench.measure.buffers import Buffers, ProbeBuffers, random_pad
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.subject import PROBE_DISTRIBUTION, Subject
from flexq_bench.workloads.gemm import GemmWorkload


class ProbeSubject(Subject):
    input_distribution = PROBE_DISTRIBUTION

    def __init__(
        self, probe: Probe, spec: KernelSpec, gemm: GemmWorkload, device: torch.device, seed: int
    ) -> None:
        self.spec = spec
        self._probe, self._gemm, self._device = probe, gemm, device
        self._operand = probe.allocate(gemm, device, seed)

    @property
    def copy_bytes(self) -> int:
        return self._operand.nbytes if self.spec.reads_weights else 0

    def candidates(self) -> Sequence[Config]:
        return self._probe.candidates(self._gemm)

    @property
    def tuning_bucket(self) -> int:
        return self._gemm.m

    def narrow(self, config: Config | None) -> None:
        """A probe has only the bytes that it reads."""

    def default_config(self) -> Config | None:
        return None

    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        operand = self._probe.allocate(self._gemm, self._device, seed)
        result = self._probe.check(operand, config)
        wrong = "" if result.exact else f"{self.spec.label} is wrong: {result.detail}"
        return CheckResult(None, result.exact, wrong)

    def place(
        self, copies: int, *, seed: int, weights: Sequence[PackedOperand] | None = None
    ) -> Buffers:
        pad = random_pad(self._device, seed)
        return ProbeBuffers(self._probe, [self._operand.clone() for _ in range(copies)], pad)
