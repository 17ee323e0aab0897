"""The read floor and the empty launch on a CPU."""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import Config, PackedOperand, Probe, ProbeResult, probe_spec
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.workloads.gemm import GemmWorkload


class ReadWeights(Probe):
    """Sum the words of packed weights: the minimum that a kernel of this width reads."""

    def __init__(self, fmt: NumberFormat) -> None:
        summary = f"reads packed {fmt.bits}-bit weights and their scales, nothing else"
        self.spec = probe_spec(f"read-{fmt.bits}", "cpu", summary, weight=fmt, version=2)

    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        size = gemm.weight_bytes(self.spec.weight.bits, self.spec.weight.group)
        generator = torch.Generator().manual_seed(seed)
        # int64, the type of the sum: torch first copies other types to it, which takes longer.
        words = torch.randint(
            -(2**62), 2**62, (-(-size // 8),), generator=generator, dtype=torch.int64, device=device
        )
        buffers = {"words": words, "sum": torch.zeros(1, dtype=torch.int64, device=device)}
        return PackedOperand(buffers, gemm.n, gemm.k)

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        words = operand.buffers["words"]
        torch.sum(words, dim=0, keepdim=True, out=operand.buffers["sum"])

    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        operand.buffers["sum"].fill_(-1)
        self.launch(operand)
        total, expected = int(operand.buffers["sum"]), sum(operand.buffers["words"].tolist())
        is_equal = (total - expected) % 2**64 == 0  # sums of int64 wrap
        return ProbeResult(is_equal, f"sum {total}, expected {expected}")


class EmptyKernel(Probe):
    """A launch that does nothing, to measure the overhead of a call."""

    spec = probe_spec("empty", "cpu", "does nothing: the cost of a launch", reads_weights=False)

    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        return PackedOperand({"cell": torch.zeros(1, device=device)}, gemm.n, gemm.k)

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        operand.buffers["cell"].view(1)

    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        self.launch(operand)
        return ProbeResult(exact=True)
