"""Choosing each linear layer's configuration inside the decode step that it is for.

A kernel starts before the one in front of it has ended, and lets the next one in before it has
ended itself: which configuration is fastest depends on what stands before and behind it. So
candidates are timed in steps of a model's first blocks, layer by layer, the largest first.
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
from flexq_bench.decode.stopwatch import stopwatch
from flexq_bench.measure.device import describe_environment
from flexq_bench.measure.tuning import Tuning
from kernels.autotune import TuningKey, TuningMemory
from kernels.contract import Config, LinearKernel
from kernels.decoder import DecoderOperations
from kernels.runtime.nvrtc import builds_hash
from workloads.gemm import GemmWorkload

STAGE = "decode-step"  # of the tuning key
_COPIES_OF_L2 = 3  # bytes of weights that are read between two reads of the same one
_FEWEST_BLOCKS = 6  # a step also has a head, which is not a part of any of them
_WARM_UP, _SAMPLES = 3, 15  # steps
# A glance at a bad moment made a configuration win that cost 3 % of a step: those that are this
# near are timed again, with so many times as many steps.
_NEAR, _SECOND_LOOK = 0.015, 6
_TOKENS = 32  # that a sequence has room for while steps are timed


class StepTuner:
    """choose(kernel, m, n, k): the kernel's heuristic, until `settle` has found what is faster.

    tuning: where choices come from. operations: the non-GEMM operators. sizes: numbers of tokens to
    choose for.
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
        """The configuration for m tokens of each layer that has one, by name."""
        block = model.blocks[0]
        chosen = {
            linear.name: self(linear.kernel, m, linear.weights.rows, linear.weights.k)
            for linear in (block.qkv, block.out, block.widen, block.down, model.head)
        }
        return {name: config.as_dict() for name, config in chosen.items() if config is not None}

    def settle(self, model: Model) -> None:
        """Time the candidates of every layer of a loaded model, or remember the fastest."""
        if self._tuning is Tuning.NONE:
            return
        some, block = first_blocks(model), model.blocks[0]
        linears = (block.widen, block.down, block.qkv, block.out, model.head)
        for m in sorted(self._sizes):
            for linear in sorted(linears, key=lambda linear: -linear.nbytes):
                self._settle(some, linear, m)
        release(self._device)

    def _settle(self, model: Model, linear: PackedLinear, m: int) -> None:
        kernel, n, k = linear.kernel, linear.weights.rows, linear.weights.k
        gemm, key = GemmWorkload(m, n, k), (kernel.spec.label, m, n, k)
        candidates = self._fused(kernel, gemm)
        if len(candidates) < 2:
            return

        def time_us(config: Config, samples: int = _SECOND_LOOK * _SAMPLES) -> float:
            self._chosen[key] = config
            return step_us(model, self._operations, self, m, samples)

        self._chosen[key] = self._memory.choose(
            self._key(kernel, gemm),
            candidates,
            time_us,
            lambda config: time_us(config, _SAMPLES),
            _NEAR,
        )

    def _heuristic(self, kernel: LinearKernel, gemm: GemmWorkload) -> Config | None:
        chosen = kernel.default_config(gemm)
        if self._tuning is Tuning.NONE or gemm.m not in self._sizes:
            return chosen
        fused = self._fused(kernel, gemm)
        return chosen if chosen in fused or not fused else fused[0]

    def _fused(self, kernel: LinearKernel, gemm: GemmWorkload) -> Sequence[Config]:
        """Candidates whose activations what comes before can write; all, if there are none such.

        They also read the layout of weights that prompts of any length do.
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
    samples: int = _SAMPLES,
) -> float:
    """Microseconds of a step of `batch` short sequences, the median of so many samples.

    Raises what a configuration raises.
    """
    engine = Engine(model, operations, choose, slots=batch, capacity=_TOKENS)
    try:
        engine.prepare(batch, _TOKENS)
        engine.positions.fill_(_TOKENS // 2)
        watch = stopwatch(model.device)
        for step in range(_WARM_UP + samples):
            if step >= _WARM_UP:
                watch.mark()
            engine.advance(batch, _TOKENS)
        watch.mark()
        return statistics.median(watch.intervals_ms()) * 1000
    finally:
        engine.close()


def first_blocks(model: Model) -> Model:
    """A model of so few blocks that steps are short, and so many that weights are read cold."""
    blocks = _FEWEST_BLOCKS
    if model.device.type == "cuda":
        block = model.blocks[0]
        of_block = sum(linear.nbytes for linear in (block.qkv, block.out, block.widen, block.down))
        l2 = torch.cuda.get_device_properties(model.device).L2_cache_size
        blocks = max(blocks, -(-_COPIES_OF_L2 * l2 // of_block))
    return replace(model, blocks=model.blocks[:blocks])
