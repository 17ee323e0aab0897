"""Sustained speed of decode steps, by configuration of each linear layer.

    python benchmarks/decode/power.py --model llama-13b --scheme flexq-w6ax --batch 8 --length 527

A GPU that reads memory at full speed for a second reaches its power limit and lowers its clocks.
Some configurations that are equally fast in a short run need less energy per step, and are then
faster in a long run. For each layer all configurations are timed in short runs of some tens of
steps (`at_once`), and the fastest of them alternately for more than a second each, without a pause
(`kept`). Then the configurations selected by each of the two are timed alternately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from contents import begin_sequences
from json_lines import say_row

from flexq_bench.decode.case import open_model
from flexq_bench.decode.decoder import Model
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.layers import PackedLinear
from flexq_bench.decode.loading import load
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.kernels.contract import Config, LinearKernel
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.measure import Tuning
from flexq_bench.measure.nvml import Nvml, open_handle
from flexq_bench.workloads.gemm import GemmWorkload

_AT_ONCE, _TURN = 30, 60  # steps
_WARM_UP_S, _TURN_S, _ROUNDS = 1.5, 1.5, 2
_MIN_GAIN = 0.003  # by which another configuration must be faster to be kept
_DEVICE = torch.device("cuda")

Choices = dict[tuple[int, int], Config]  # by N and K


@dataclass(slots=True)
class Contender:
    """A step with its configurations. Times in ms; energy of all its turns in J."""

    engine: Engine
    at_once_ms: float = 0.0
    turns_ms: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    joules: float = 0.0
    steps: int = 0

    def row(self) -> dict[str, float]:
        """Return the results as a row to print."""
        kept = statistics.median(self.turns_ms) if self.turns_ms else None
        row = {"at_once_ms": round(self.at_once_ms, 4)}
        if kept is not None:
            row |= {"kept_ms": round(kept, 4), "j_step": round(self.joules / self.steps, 4)}
            row["watts"] = round(1000 * row["j_step"] / row["kept_ms"])
            row["sm_mhz"] = round(statistics.mean(self.clocks_mhz))
        return row


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of `batch` sequences of `length` tokens."""

    model: Model
    tuner: StepTuner
    nvml: Nvml
    batch: int
    length: int
    kv_bits: int

    def contender(self, choices: Mapping[tuple[int, int], Config]) -> Contender:
        """A captured step, timed at once. choices: configurations that replace the tuner's."""

        def choose(kernel: LinearKernel, m: int, n: int, k: int) -> Config | None:
            return choices.get((n, k)) or self.tuner(kernel, m, n, k)

        engine = Engine(
            self.model,
            CudaOperations(),
            choose,
            slots=self.batch,
            capacity=self.length,
            kv_bits=self.kv_bits,
        )
        begin_sequences(engine, self.batch)
        engine.prepare(self.batch, engine.bucket(self.length))
        found = Contender(engine)
        found.at_once_ms = statistics.median(self._run(engine, _AT_ONCE) for _ in range(3))
        return found

    def take_turns(self, contenders: list[Contender]) -> None:
        """Run all contenders in turn, several times, for some seconds each."""
        began = time.perf_counter()
        while time.perf_counter() - began < _WARM_UP_S:
            self._run(contenders[0].engine, _TURN)
        for _ in range(_ROUNDS):
            for contender in contenders:
                self._turn(contender)

    def _turn(self, contender: Contender) -> None:
        began, before = time.perf_counter(), self.nvml.energy_j() or 0.0
        while time.perf_counter() - began < _TURN_S:
            contender.turns_ms.append(self._run(contender.engine, _TURN))
            contender.clocks_mhz.append(self.nvml.sm_clock_mhz() or 0.0)
            contender.steps += _TURN
        contender.joules += (self.nvml.energy_j() or 0.0) - before

    def _run(self, engine: Engine, steps: int) -> float:
        """Milliseconds a step."""
        engine.positions.fill_(self.length - 64)
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(steps):
            engine.advance(self.batch, engine.bucket(self.length))
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--scheme", default="flexq-w6ax")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=527)
    parser.add_argument("--kv-bits", type=int, default=16)
    parser.add_argument("--finalists", type=int, default=4)
    parser.add_argument("--layers", default="gate_up_proj,down_proj,qkv_proj,o_proj")
    parser.add_argument("--seconds", type=float, default=70.0, help="for the layers")
    arguments = parser.parse_args()
    nvml = open_handle(_DEVICE)
    if nvml is None:
        raise SystemExit("no NVML: install nvidia-ml-py")
    began = time.perf_counter()
    tuner = StepTuner(_DEVICE, CudaOperations(), Tuning.REMEMBERED, frozenset((arguments.batch,)))
    source = open_model(arguments.model, arguments.scheme, 0)
    model = load(source, _DEVICE, arguments.length, tuner, (arguments.batch,))
    tuner.tune(model)
    steps = Steps(model, tuner, nvml, arguments.batch, arguments.length, arguments.kv_bits)
    block = model.blocks[0]
    of_name = {linear.name: linear for linear in block.linears}
    kept: Choices = {}
    for name in filter(None, arguments.layers.split(",")):
        if time.perf_counter() - began < arguments.seconds:
            _settle(steps, of_name[name], kept, arguments.finalists)
    both = [steps.contender({}), steps.contender(kept)]
    for _ in range(2):
        steps.take_turns(both)
    for choices, contender in zip(("at once", "kept"), both, strict=True):
        say_row({"choices": choices, **contender.row()})


def _settle(steps: Steps, linear: PackedLinear, kept: Choices, finalists: int) -> None:
    """Put a layer's configuration to `kept` if it keeps more of its speed than the tuner's."""
    kernel, n, k = linear.kernel, linear.weights.rows, linear.weights.k
    x = kernel.empty_activation(steps.batch, k, _DEVICE)
    chosen = steps.tuner(kernel, steps.batch, n, k)
    contenders: list[tuple[Contender, Config]] = []
    for config in kernel.candidates(GemmWorkload(steps.batch, n, k)):
        if kernel.packing(x, config) is not None:
            contenders.append((steps.contender({**kept, (n, k): config}), config))
    contenders.sort(key=lambda pair: (pair[1] != chosen, pair[0].at_once_ms))
    near = [contender for contender, _ in contenders[:finalists]]
    steps.take_turns(near)
    for contender, config in contenders:
        is_chosen = config == chosen
        row = {"layer": linear.name, "chosen": is_chosen, **contender.row()}
        say_row({**row, "config": config.as_dict()})
        contender.engine.close()
    times = [statistics.median(contender.turns_ms) for contender in near]
    best = times.index(min(times))
    if times[best] < times[0] * (1 - _MIN_GAIN):
        kept[n, k] = contenders[best][1]


if __name__ == "__main__":
    main()
