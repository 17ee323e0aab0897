"""Choosing each linear layer's configuration as a decode step runs it: behind what packs its input.

A GEMM that may start before the kernel in front of it has ended is timed with such a kernel in
front: what hides behind what decides between candidates that are alike on their own.
"""

from __future__ import annotations

import statistics

import torch

from flexq_bench.measure.device import describe_environment
from flexq_bench.measure.inputs import WEIGHT_STD
from flexq_bench.measure.tuning import Tuning
from kernels.autotune import TuningKey, TuningMemory
from kernels.contract import Config, LinearKernel, PackedOperand
from kernels.decoder import DecoderOperations, Destination, Norm
from kernels.runtime.nvrtc import builds_hash
from workloads.gemm import GemmWorkload

STAGE = "decode"  # of the tuning key: what packs the input, and the layer
_COPIES_OF_L2 = 3  # bytes of weights that are read between two reads of the same one
_MOST_COPIES = 64
_SAMPLES = 9


class StepTuner:
    """choose(kernel, m, n, k) for numbers of tokens in `sizes`; the kernel's heuristic for others.

    tuning: where choices come from. operations: what packs activations in a step.
    """

    def __init__(
        self,
        device: torch.device,
        operations: DecoderOperations,
        tuning: Tuning,
        sizes: frozenset[int],
    ) -> None:
        self._device, self._operations, self._tuning = device, operations, tuning
        self._sizes = sizes
        self._memory: TuningMemory = tuning.memory()
        self._chosen: dict[tuple[str, int, int, int], Config | None] = {}

    def __call__(self, kernel: LinearKernel, m: int, n: int, k: int) -> Config | None:
        key = (kernel.spec.label, m, n, k)
        if key not in self._chosen:
            self._chosen[key] = self._choose(kernel, GemmWorkload(m, n, k))
        return self._chosen[key]

    def _choose(self, kernel: LinearKernel, gemm: GemmWorkload) -> Config | None:
        if self._device.type != "cuda" or self._tuning is Tuning.NONE or gemm.m not in self._sizes:
            return kernel.default_config(gemm)
        candidates = self._fused(kernel, gemm)
        if not candidates:
            return kernel.default_config(gemm)
        timer = _Timer(kernel, gemm, self._operations, self._device)
        chosen = self._memory.choose(self._key(kernel, gemm), candidates, timer)
        timer.close()
        return chosen

    def _fused(self, kernel: LinearKernel, gemm: GemmWorkload) -> list[Config]:
        """Candidates whose activations what comes before can write; all, if there are none such.

        They also read the layout of weights that prompts of any length do.
        """
        x = kernel.empty_activation(gemm.m, gemm.k, self._device)
        candidates = list(kernel.candidates(gemm))
        fused = [config for config in candidates if kernel.packing(x, config) is not None]
        return fused or candidates

    def _key(self, kernel: LinearKernel, gemm: GemmWorkload) -> TuningKey:
        spec = kernel.spec
        environment = describe_environment(self._device, None)
        software = [environment[name] for name in sorted(environment) if name in _SOFTWARE]
        return TuningKey(
            spec.label,
            spec.version,
            kernel.tuning_bucket(gemm.m),
            gemm.n,
            gemm.k,
            STAGE,
            "cold",
            torch.cuda.get_device_name(self._device),
            " ".join([*software, builds_hash(tuple(kernel.builds()))]),
        )


_SOFTWARE = ("torch", "cuda", "cublas", "nvrtc", "nvmath")


class _Timer:
    """Microseconds of what packs the input and a layer under a configuration, weights cold."""

    def __init__(
        self,
        kernel: LinearKernel,
        gemm: GemmWorkload,
        operations: DecoderOperations,
        device: torch.device,
    ) -> None:
        self._kernel, self._gemm, self._operations = kernel, gemm, operations
        self._device = device
        self._weights: list[PackedOperand] = []

    def _place(self) -> None:
        kernel, gemm, device = self._kernel, self._gemm, self._device
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.empty(shape, dtype=torch.float16, device=device)
            return values.normal_(generator=generator)

        weight = kernel.pack_weight(kernel.quantize_weight(draw(gemm.n, gemm.k) * WEIGHT_STD))
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        copies = min(_MOST_COPIES, -(-_COPIES_OF_L2 * l2 // weight.nbytes) + 1)
        self._weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        self._x = draw(gemm.m, gemm.k)
        self._norm = Norm(torch.ones(gemm.k, dtype=torch.float16, device=device), None, 1e-5)
        self._packed = kernel.empty_activation(gemm.m, gemm.k, device)
        self._out = torch.empty(gemm.m, gemm.n, dtype=torch.float16, device=device)

    def close(self) -> None:
        """Give the weights back."""
        self._weights = []

    def __call__(self, config: Config) -> float:
        if not self._weights:
            self._place()
        self._run(self._weights[:1], config)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run(self._weights, config)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        times: list[float] = []
        for _ in range(_SAMPLES):
            graph.replay()  # behind an untimed one the host has queued the rest
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1000 / len(self._weights))
        graph.reset()
        return statistics.median(times)

    def _run(self, weights: list[PackedOperand], config: Config) -> None:
        to = Destination(self._kernel, self._packed, config)
        # What stands before a layer that widens is a norm; before the others nothing reads a row.
        widens = self._gemm.n >= self._gemm.k
        for weight in weights:
            if widens:
                self._operations.norm(self._x, None, self._norm, to)
            else:
                self._operations.relu(self._x, to)
            self._kernel.gemm(self._packed, weight, self._out, config=config)
