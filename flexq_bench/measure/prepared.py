"""A case prepared on a device: bound, configured, checked and placed repeatedly."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexq_bench.errors import MeasureError
from flexq_bench.kernels.autotune import NEAR, TuningKey, TuningMemory, preferring
from flexq_bench.kernels.contract import (
    Config,
    Kernel,
    KernelSpec,
    OperationKernel,
    PackedOperand,
    is_plain,
)
from flexq_bench.kernels.runtime.module import binary_hash, compile_ahead
from flexq_bench.kernels.runtime.nvrtc import Build, builds_hash
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.binding import bind
from flexq_bench.measure.buffers import Buffers, Draw, UnseenInputs
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.clocks import Clock, Rotation
from flexq_bench.measure.given_inputs import Parts
from flexq_bench.measure.inputs import derive_seed
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.tuning import BriefTimer
from flexq_bench.measure.weight_rotation import SharedWeights, copies_for
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import OperationWorkload

# Launches on new inputs are compared with repetitions on the same inputs: number of repetitions,
# including a first one that fills the caches; the number for long launches; and most microseconds
# of a repetition, if it has more than one launch.
_REPETITIONS, _LONG_REPETITIONS, _MAX_REPEATED_US = 9, 5, 2000.0
_MAX_REPEAT_SPEEDUP = 1.5
_LOOKS = 3  # one after the other, all of which must find it


@dataclass(frozen=True, slots=True)
class Placed:
    """Buffers allocated for one placement, and the rotation that is timed over them."""

    rotation: Rotation
    buffers: Buffers
    config: Config | None
    clock: Clock
    tolerance: float

    def _remembered(self) -> str:
        """Describe that launches are faster, or only right, on inputs that they have seen.

        A launch function on the host can inspect its operands and cache results. Launches with new
        activations alternate with repetitions of the same launches, and with launches on the
        activations of the timed samples, whose results may have been cached after many of them, or
        before. All are on copies of the weights that are in the host's caches. This is not a
        measurement: even the fastest launch on new inputs must take far longer than the median of
        the others. Empty: neither.
        """
        launch_us = self.rotation.repeated_us(1)
        if launch_us is None:
            return ""
        with self.buffers.unseen_inputs() as inputs:
            if inputs is None:
                return ""
            # On a busy machine an honest launch may look so once.
            for _ in range(_LOOKS):
                least_us, usual_us, wrong = self._new_and_again(inputs, launch_us)
                if wrong:
                    return wrong
                if least_us <= _MAX_REPEAT_SPEEDUP * usual_us:
                    return ""
        return (
            f"a launch takes at least {least_us:.3g} us of CPU on activations that it has not seen "
            f"and {usual_us:.3g} us on others: results are remembered"
        )

    def _new_and_again(self, inputs: UnseenInputs, launch_us: float) -> tuple[float, float, str]:
        """Microseconds of a launch: the least on new activations, the median on seen ones.

        The seen ones are those of the timed samples or the new ones again, whichever are faster.
        Also describes errors of one launch on new activations; empty: none.
        """
        most = min(inputs.launches, self.rotation.launches)
        launches = max(1, min(most, int(_MAX_REPEATED_US / max(launch_us, 1e-3))))
        times: defaultdict[Draw, list[float]] = defaultdict(list)
        wrong = ""
        repetitions = _REPETITIONS if launch_us < _MAX_REPEATED_US else _LONG_REPETITIONS
        judged = random.randrange(repetitions + 1)  # one more, which a launch can't recognize
        for repetition in range(repetitions + 1):
            for draw in ("timed", "new", "same"):
                # A busy machine's scheduler must not keep step with this loop.
                for _ in range(random.randrange(3)):
                    inputs.draw("same")
                inputs.draw(draw)
                if draw == "new" and repetition == judged:
                    inputs.draw_known(launches)
                time_us = self.rotation.repeated_us(launches) or 0.0
                if repetition != judged:  # only the first look finds these activations unseen
                    times[draw].append(time_us)
                elif draw == "new":
                    wrong = inputs.wrong(self.tolerance)
        usual_us = min(statistics.median(times[draw][1:]) for draw in ("timed", "same"))
        return min(times["new"][1:]), usual_us, wrong  # caches were cold in the first repetition

    @property
    def failed(self) -> tuple[int, int] | None:
        """See Buffers."""
        return self.buffers.failed

    def launch_again(self, x: int, w: int) -> str:
        """Launch on inputs of which a launch was wrong: see Buffers."""
        return self.buffers.launch_again(x, w, self.config, self.tolerance)

    def inspect(self) -> str:
        """Describe errors in the results of the timed launches; empty: none.

        The order is: operands that a kernel's code changed; outputs of unannounced samples; outputs
        of one more sample, filled with NaN before; cached results.
        """
        self.clock.synchronize()
        remembered = self._remembered()
        self.buffers.poison()
        self.clock.synchronize()
        self.rotation.sample(1)
        self.clock.synchronize()
        return self.buffers.inspect(self.config, self.tolerance) or remembered


@dataclass(frozen=True, slots=True)
class TuningMachine:
    """Scope of a tuned choice: the GPU's SKU, the libraries and the compiler."""

    gpu: str
    software: str


class PreparedCase:
    """A kernel at one shape, with its inputs drawn from the seed and packed.

    spec: of the kernel, as it was before its code ran. config: the configuration that runs; the
    kernel's own heuristic until one is chosen or given. copies: of the weights, in a rotation.
    seed: of the run. secret: seed of the inputs that change between samples. shared: weights of
    earlier cases. distinct: see Rewriting. warm: the device was just busy. All methods require the
    clock's device to be the current one. Raises UnsupportedError if the cache mode is not possible,
    and any exception of the kernel.
    """

    processes = 1

    def __init__(
        self,
        kernel: Kernel,
        spec: KernelSpec,
        case: Case,
        device: torch.device,
        clock: Clock,
        protocol: Protocol,
        *,
        l2_bytes: int | None,
        seed: int,
        secret: int,
        shared: SharedWeights,
        distinct: bool,
        warm: bool = False,
    ) -> None:
        self.case, self.kernel = case, kernel
        self._clock, self._protocol, self._seed, self._warm = clock, protocol, seed, warm
        self._spec, self.secret, self.format_names = spec, secret, spec.format_names
        rewriting = Rewriting(secret, protocol, l2_bytes or protocol.assumed_l2_bytes, distinct)
        self._subject = bind(kernel, spec, case, device, seed, rewriting, shared)
        self.input_distribution = self._subject.input_distribution
        self._l2_bytes = l2_bytes
        self.copies = self._needed_copies()
        self.config = self._subject.default_config()
        self._launches: dict[tuple[int, Config | None], int] = {}

    def _take(self, config: Config | None) -> None:
        """Use this configuration, without weights that it doesn't read."""
        self.config = config
        self._subject.narrow(config)
        self.copies = self._needed_copies()

    def _needed_copies(self) -> int:
        return copies_for(
            self.case.cache,
            self._subject.copy_bytes,
            self._l2_bytes,
            self._protocol,
            read_bytes=self._subject.read_bytes,
        )

    @property
    def config_values(self) -> dict[str, Any]:
        """The configuration as stored values."""
        return {} if self.config is None else self.config.as_dict()

    @property
    def binary_hash(self) -> str | None:
        """Hash of the machine code that runs; None: that of a library."""
        return binary_hash(self._builds_for(self.config))

    def _builds_for(self, config: Config | None) -> Sequence[Build]:
        if isinstance(self.kernel, OperationKernel):
            assert isinstance(self.case.workload, OperationWorkload)
            return self.kernel.builds_for(self.case.workload, config)
        return self.kernel.builds_for(self.case.gemm, config)

    @property
    def _tuning_scope(self) -> tuple[int, int, str]:
        """N, K and the stage; of another operation zeros, and its parameters."""
        if isinstance(self.case.workload, OperationWorkload):
            return 0, 0, self.case.workload.key
        return self.case.gemm.n, self.case.gemm.k, self.case.stage

    def choose_config(
        self,
        memory: TuningMemory,
        machine: TuningMachine,
        *,
        favourite: Mapping[str, Any] | None = None,
    ) -> None:
        """Use the fastest candidate, or the favourite (as a dict) if it is nearly as fast."""
        candidates = self._subject.candidates()
        if not candidates:
            self.use_default()
            return
        spec, case = self.kernel.spec, self.case
        of_external = "" if spec.source_hash is None else f" sources {spec.source_hash}"
        key = TuningKey(
            spec.label,
            spec.version,
            self._subject.tuning_bucket,
            *self._tuning_scope,
            case.cache,
            machine.gpu,
            # A choice made under another regime is invalid.
            f"{machine.software} {builds_hash(tuple(self.kernel.builds()))} "
            f"protocol {self._protocol.version} {case.regime}{of_external}",
            "" if favourite is None else str(dict(favourite)),
        )
        timer = self._timer()
        glance = preferring(timer.glance, favourite)
        if self._protocol.retimes:
            chosen = memory.choose(key, candidates, preferring(timer, favourite), glance)
        else:
            chosen = memory.choose(key, candidates, glance)
        self._take(chosen)

    def time_candidates(self) -> Iterator[tuple[Config, float]]:
        """Microseconds per launch of every candidate: a coarse time, and a brief one for those near
        the best.
        """
        timer = self._timer()
        glances = [(config, timer.glance(config)) for config in self._subject.candidates()]
        near = min((microseconds for _, microseconds in glances), default=0.0) * (1 + NEAR)
        for config, microseconds in glances:
            yield config, timer(config) if microseconds <= near else microseconds

    def time_in_turn(self, configs: Sequence[Config], rounds: int) -> list[list[float]]:
        """Microseconds per launch, [rounds][configs]: alternating, so a drift affects all alike."""
        timer = self._timer()
        return [[timer(config) for config in configs] for _ in range(rounds)]

    def _timer(self) -> BriefTimer:
        return BriefTimer(
            self._place_candidates,
            self._clock,
            self._protocol,
            regime=self.case.regime,
            warm=self._warm,
        )

    def _place_candidates(self) -> Buffers:
        configs = self._subject.candidates()
        compile_ahead(b for c in configs for b in self._builds_for(c))
        seed = derive_seed(self._seed, self.case.key, "tuning")
        return self._subject.place(self.copies, seed=seed)

    def use_default(self) -> None:
        """Use the kernel's own heuristic."""
        self._take(self._subject.default_config())

    def use_config(self, arguments: Mapping[str, Any]) -> None:
        """Use the candidate that equals this dict; empty: the default. Raises MeasureError."""
        if not arguments:
            self.use_default()
            return
        known = [self._subject.default_config(), *self._subject.candidates()]
        for config in known:
            if (config.as_dict() if config is not None else {}) == arguments:
                self._take(config)
                return
        raise MeasureError(f"{self.case.label} has no configuration {dict(arguments)}")

    def check(self, when: str) -> CheckResult:
        """Check the results on newly drawn inputs. when: "before" or "after" the samples."""
        spec = self.kernel.spec
        if not is_plain(spec) or spec != self._spec:
            return CheckResult(None, None, f"its code changed the spec of {self._spec.label}")
        seed = derive_seed(self._seed, self.case.workload, "check", when)
        return self._subject.check(self.config, seed=seed, tolerance=self._protocol.tolerance)

    def given(self, parts: Parts) -> Any:
        """The inputs of these parts, as buffers take them. Raises ValueError if one is missing."""
        return self._subject.given(parts)

    def buffers(self, index: int, *, weights: Sequence[PackedOperand] | None = None) -> Buffers:
        """Buffers of placement `index`, allocated now.

        weights: copies of another subject, which are used again if they have the same bytes.
        """
        seed = derive_seed(self._seed, self.case.key, "placement", index)
        self._clock.release_memory()
        return self._subject.place(self.copies, seed=seed, weights=weights)

    def assume_launches(self, launches: int) -> None:
        """Give samples so many launches, without timing some to choose the number."""
        self._launches[self.copies, self.config] = launches

    @contextmanager
    def placed(self, index: int, *, buffers: Buffers | None = None) -> Iterator[Placed]:
        """Placement `index`: a rotation over buffers that are freed on leaving.

        buffers: those of the placement; None: they are allocated now.
        """
        if buffers is None:
            buffers = self.buffers(index)
        most = self.copies if self._subject.is_updated else self._protocol.max_launches
        rotation = self._clock.rotation(
            buffers.bound(self.config),
            self.copies,
            replace(self._protocol, max_launches=most),
            buffers.between,
            self._launches.get((self.copies, self.config)),
        )
        # All placements have samples of the same length.
        self._launches[self.copies, self.config] = rotation.launches
        try:
            yield Placed(rotation, buffers, self.config, self._clock, self._protocol.tolerance)
        finally:
            rotation.close()

    def close(self) -> None:
        """Do nothing: all of the case is in this process."""
