"""Tuning of each linear layer's configuration within a decode step.

Consecutive kernels overlap (programmatic dependent launch), so the fastest configuration depends on
the kernels before and after. Candidates are therefore timed in steps of a model's first blocks,
layer by layer, the largest first, twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flexq_bench.decode.decoder import Model
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.layers import ChooseConfig, PackedLinear
from flexq_bench.decode.loading import release
from flexq_bench.decode.stopwatch import Stopwatch
from flexq_bench.kernels.autotune import TuningKey, TuningMemory, choose_fastest
from flexq_bench.kernels.contract import Config, LinearKernel
from flexq_bench.kernels.decoder import DecoderOperations
from flexq_bench.kernels.runtime.nvrtc import builds_hash
from flexq_bench.kernels.runtime.ranks import ALONE
from flexq_bench.measure.device import describe_environment
from flexq_bench.measure.tuning import Tuning
from flexq_bench.workloads.gemm import GemmWorkload

STAGE = "decode-step"  # of the tuning key
_MIN_L2_CACHES = 3  # weights of the timed blocks, in sizes of the L2 cache, so that they are cold
_MIN_BLOCKS = 6  # so that the head's share of a step is small
_WARM_UP_STEPS, _SAMPLE_STEPS = 3, 15  # steps
# Candidates within this fraction of the fastest are timed again, with this factor more steps: a
# disturbed first timing once selected a configuration that cost 3 % of a step.
_MAX_RETIMED_EXCESS, _RETIME_FACTOR = 0.015, 6
_CAPACITY_TOKENS = 32  # capacity of a sequence while steps are timed


class StepTuner:
    """A ChooseConfig: stored choices and the kernel's heuristic, after `tune` the fastest ones.

    tuning: source of choices. operations: the non-GEMM operators. sizes: numbers of tokens to tune
    for.
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
            self._chosen[key] = self._heuristic(kernel, GemmWorkload(m, n, k))
        return self._chosen[key]

    def configs(self, model: Model, m: int) -> dict[str, dict[str, Any]]:
        """Configurations for m tokens by layer name; layers without one are left out."""
        chosen = {
            linear.name: self(linear.kernel, m, linear.weights.rows, linear.weights.k)
            for linear in (*model.blocks[0].linears, model.head)
        }
        return {name: config.as_dict() for name, config in chosen.items() if config is not None}

    def tune(self, model: Model) -> None:
        """Time the candidates of every layer of a loaded model, or use stored choices."""
        if self._tuning is Tuning.NONE:
            return
        # Alone, as ranks may time candidates in other orders.
        first, block = replace(first_blocks(model), ranks=ALONE), model.blocks[0]
        linears = (*block.linears, model.head)
        for m in sorted(self._sizes):
            for is_last in (False, True):  # the choices of a pass depend on those before it
                for linear in sorted(linears, key=lambda linear: -linear.nbytes):
                    self._tune_layer(first, linear, m, is_last=is_last)
        release(self._device)

    def _tune_layer(self, model: Model, linear: PackedLinear, m: int, *, is_last: bool) -> None:
        kernel, n, k = linear.kernel, linear.weights.rows, linear.weights.k
        gemm, key = GemmWorkload(m, n, k), (kernel.spec.label, m, n, k)
        candidates = self._fused(kernel, gemm)
        if len(candidates) < 2:
            return

        def time_us(config: Config, samples: int = _RETIME_FACTOR * _SAMPLE_STEPS) -> float:
            self._chosen[key] = config
            return step_us(model, self._operations, self, m, samples)

        def briefly_us(config: Config) -> float:
            return time_us(config, _SAMPLE_STEPS)

        tuning_key = self._key(kernel, gemm)
        if is_last:
            self._chosen[key] = self._memory.choose(
                tuning_key, candidates, time_us, briefly_us, _MAX_RETIMED_EXCESS
            )
        else:
            stored = self._memory.recall(tuning_key, candidates)
            self._chosen[key] = stored or choose_fastest(candidates, briefly_us)

    def _heuristic(self, kernel: LinearKernel, gemm: GemmWorkload) -> Config | None:
        chosen = kernel.default_config(gemm)
        if self._tuning is Tuning.NONE or gemm.m not in self._sizes:
            return chosen
        fused = self._fused(kernel, gemm)
        stored = None
        if len(fused) > 1:
            stored = self._memory.recall(self._key(kernel, gemm), fused)
        return stored or (chosen if chosen in fused or not fused else fused[0])

    def _fused(self, kernel: LinearKernel, gemm: GemmWorkload) -> Sequence[Config]:
        """Candidates whose activations the preceding operator can write; all, if there are none.

        They use the same weight layout as prompts of any length.
        """
        x = kernel.empty_activation(gemm.m, gemm.k, self._device)
        candidates = kernel.candidates(gemm)
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


def step_us(
    model: Model,
    operations: DecoderOperations,
    choose: ChooseConfig,
    batch: int,
    samples: int = _SAMPLE_STEPS,
) -> float:
    """Median microseconds of a step of `batch` short sequences.

    Raises what a configuration raises.
    """
    engine = Engine(model, operations, choose, slots=batch, capacity=_CAPACITY_TOKENS)
    try:
        engine.prepare(batch, _CAPACITY_TOKENS)
        engine.positions.fill_(_CAPACITY_TOKENS // 2)
        watch = Stopwatch(model.device)
        for step in range(_WARM_UP_STEPS + samples):
            if step >= _WARM_UP_STEPS:
                watch.mark()
            engine.advance(batch, _CAPACITY_TOKENS)
        watch.mark()
        return statistics.median(watch.intervals_ms()) * 1000
    finally:
        engine.close()


def first_blocks(model: Model) -> Model:
    """Truncate a model to its first blocks, so that steps are short but weights are read cold."""
    blocks = _MIN_BLOCKS
    if model.device.type == "cuda":
        block_bytes = model.blocks[0].nbytes
        l2 = torch.cuda.get_device_properties(model.device).L2_cache_size
        blocks = max(blocks, -(-_MIN_L2_CACHES * l2 // block_bytes))
    return replace(model, blocks=model.blocks[:blocks])
