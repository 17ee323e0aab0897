"""The read floor, the empty launch and a launch of known length on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from flexq_bench.kernels.contract import Config, PackedOperand, Probe, ProbeResult, probe_spec
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.workloads.gemm import GemmWorkload

_CHUNK_BYTES = 16  # of one load
_DEFAULT_UNROLL = 8
_UNROLLS = (4, 8)
SPIN_CYCLES = 400_000  # 0.2 ms at 1,980 MHz: the launch overhead is under 1 % of it
_SPIN = Build.of("probes/spin.cu", CYCLES=SPIN_CYCLES)
_EMPTY = Build.of("probes/read.cu", UNROLL=_DEFAULT_UNROLL, OVERLAP=0)


@dataclass(frozen=True, slots=True)
class ReadConfig(Config):
    """blocks_per_sm; threads: per block; unroll: 16-byte loads in flight per thread."""

    blocks_per_sm: int
    threads: int
    unroll: int


class ReadWeights(Probe):
    """`read-<bits>`: read as many bytes as packed weights and scales have, and nothing else.

    `read-<bits>[overlap]` starts while the previous launch still runs (programmatic dependent
    launch), as kernels with constant weights can: it is the floor of a stream of launches rather
    than of a single one.
    """

    def __init__(self, fmt: NumberFormat, *, overlap: bool = False) -> None:
        self._overlap = overlap
        summary = f"reads packed {fmt.bits}-bit weights and their scales, nothing else"
        variant = "overlap" if overlap else ""
        name = f"read-{fmt.bits}"
        self.spec = probe_spec(name, "cuda", summary, weight=fmt, variant=variant)

    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        size = gemm.weight_bytes(self.spec.weight.bits, self.spec.weight.group)
        words = -(-size // _CHUNK_BYTES) * (_CHUNK_BYTES // 4)
        generator = torch.Generator(device=device).manual_seed(seed)
        buffers = {
            "words": torch.randint(
                -(2**31), 2**31, (words,), generator=generator, dtype=torch.int32, device=device
            ),
        }
        return PackedOperand(buffers, gemm.n, gemm.k)

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        self._launch(operand, config)

    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        total = int(self._launch(operand, config).long().sum()) % 2**32
        expected = int(operand.buffers["words"].long().sum()) % 2**32
        return ProbeResult(total == expected, f"sum {total}, expected {expected}")

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return [
            ReadConfig(blocks, threads, unroll)
            for blocks, threads, unroll in product((1, 2, 4, 8), (256, 512, 1024), _UNROLLS)
        ]

    def builds(self) -> Sequence[Build]:
        return [self._build(unroll) for unroll in _UNROLLS]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        return [self._build(config.unroll if isinstance(config, ReadConfig) else _DEFAULT_UNROLL)]

    def _launch(self, operand: PackedOperand, config: Config | None) -> torch.Tensor:
        c = config if isinstance(config, ReadConfig) else ReadConfig(4, 512, _DEFAULT_UNROLL)
        words = operand.buffers["words"]
        chunks = words.numel() * 4 // _CHUNK_BYTES
        blocks = min(c.blocks_per_sm * current_gpu().sms, -(-chunks // c.threads))
        sums = torch.empty(blocks, dtype=torch.int32, device=words.device)
        arguments = (words, sums, chunks)
        function = load_function(self._build(c.unroll), "read_words")
        function.launch((blocks, 1, 1), c.threads, arguments, overlap_previous=self._overlap)
        return sums

    def _build(self, unroll: int) -> Build:
        return Build.of("probes/read.cu", UNROLL=unroll, OVERLAP=int(self._overlap))


class EmptyKernel(Probe):
    """`empty`: the overhead of a launch."""

    spec = probe_spec("empty", "cuda", "does nothing: the cost of a launch", reads_weights=False)

    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        return PackedOperand({"cell": torch.zeros(1, device=device)}, gemm.n, gemm.k)

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        load_function(_EMPTY, "empty").launch((1, 1, 1), 32, ())

    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        self.launch(operand)
        torch.cuda.synchronize()
        return ProbeResult(exact=True)

    def builds(self) -> Sequence[Build]:
        return [_EMPTY]


class Spin(Probe):
    """`spin`: wait SPIN_CYCLES cycles, to create changes of known size."""

    spec = probe_spec(
        "spin", "cuda", "waits a known number of cycles: to test comparisons", reads_weights=False
    )

    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        cell = torch.zeros(1, dtype=torch.int64, device=device)
        return PackedOperand({"cell": cell}, gemm.n, gemm.k)

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        load_function(_SPIN, "spin").launch((1, 1, 1), 32, (operand.buffers["cell"],))

    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        operand.buffers["cell"].fill_(-1)
        self.launch(operand)
        waited = int(operand.buffers["cell"])
        # An iteration of the loop takes some tens of cycles.
        exact = SPIN_CYCLES <= waited < SPIN_CYCLES + 1000
        return ProbeResult(exact, f"waited {waited:,} cycles, expected {SPIN_CYCLES:,}")

    def builds(self) -> Sequence[Build]:
        return [_SPIN]
