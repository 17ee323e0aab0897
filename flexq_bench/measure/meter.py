"""Measurement of one case on one device, from its name to a result."""

from __future__ import annotations

import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol
from weakref import finalize

import torch

from flexq_bench.db.records import DeviceInfo
from flexq_bench.errors import FlexqError, InfrastructureError, MeasureError
from flexq_bench.kernels import registry
from flexq_bench.kernels.autotune import TuningMemory
from flexq_bench.kernels.contract import Backend, Kernel, KernelSpec
from flexq_bench.kernels.errors import UnknownKernelError, UnsupportedError, first_line
from flexq_bench.kernels.external.described import DescribedKernel
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.clocks import Clock, CpuClock, CudaClock, Rotation
from flexq_bench.measure.device import (
    available_memory,
    capability,
    describe_device,
    describe_environment,
    device_infos,
    find_device,
    other_processes,
)
from flexq_bench.measure.measured import Measured
from flexq_bench.measure.memory import MemoryEstimate, estimate_memory
from flexq_bench.measure.nvml import open_handle
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.measure.outcome import extra_facts, judge_speed, status_of, with_times
from flexq_bench.measure.prepared import PreparedCase, TuningMachine
from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA
from flexq_bench.measure.protocol import Protocol as MeasuringProtocol
from flexq_bench.measure.rank_worker import COMMAND
from flexq_bench.measure.ranked_case import RankedCase, RankedCases
from flexq_bench.measure.sampling import sample_case
from flexq_bench.measure.telemetry import NoSensor, NvmlSensor, Sensor, Telemetry
from flexq_bench.measure.tuning import Tuning
from flexq_bench.measure.weight_rotation import SharedWeights
from flexq_bench.measure.worker_process import RefusedError, WorkerError
from flexq_bench.workloads.case import Case, parse_kernel_label
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload
from flexq_bench.workloads.probes import (
    EMPTY_KERNEL,
    READ_BITS,
    floor_kernel,
    is_probe,
    shape_of_bytes,
)

# Fields of the environment that affect the choice of the fastest configuration.
_TUNED_FOR = ("torch", "cuda", "driver", "compiler_flags", "nvrtc", "cublas")
_SECRET_BITS = 52  # every JSON reader supports integers of this size
WARM_S = 1.0  # clocks stay up for seconds between cases
_SHARED_PERCENT = 6  # of the memory that is free at first, for weights kept for the next cases
Resolve = Callable[[str, Backend], Kernel]


class Placement(Protocol):
    """Buffers of a kernel, which launches are timed over."""

    @property
    def rotation(self) -> Rotation: ...

    def inspect(self) -> str:
        """Describe errors in the results of the timed launches; empty: none."""
        ...


class Prepared(Protocol):
    """A case that is ready to be configured, checked and placed: see PreparedCase."""

    copies: int
    input_distribution: str
    processes: int  # that compute for it, with this one

    @property
    def secret(self) -> int: ...

    @property
    def config_values(self) -> dict[str, Any]: ...

    @property
    def binary_hash(self) -> str | None: ...

    def choose_config(self, memory: TuningMemory, machine: TuningMachine, /) -> None: ...

    def use_default(self) -> None: ...

    def check(self, when: str) -> CheckResult: ...

    def placed(self, index: int) -> AbstractContextManager[Placement]: ...

    def close(self) -> None:
        """Free what the case has beyond this process."""
        ...


class ExternalKernels(Protocol):
    """Runs external kernels in other processes."""

    def prepared(
        self, kernel: DescribedKernel, case: Case, device: torch.device, protocol: MeasuringProtocol
    ) -> Prepared: ...

    def paused(self) -> AbstractContextManager[None]:
        """Stop them, so that they can't disturb what this process measures."""
        ...


class Meter:
    """Measures cases by one protocol on one device that no other process uses.

    device: "cpu", "cuda" or "cuda:<index>". protocol None: the device's own. secret: seed of the
    inputs that change between samples, so that no kernel can predict them; a record contains it
    afterwards. None: drawn by the operating system. tuning: source of configurations. clock,
    sensor, resolve: how to read time and the device's state, and how to look up kernels; None: the
    device's own. external: runs kernels whose code is not in this process, which then judges them.
    rank_command: of the processes of a case of several GPUs. Raises DeviceError if this machine has
    no such device.
    """

    def __init__(
        self,
        device: str = "cuda:0",
        protocol: MeasuringProtocol | None = None,
        seed: int = 0,
        *,
        secret: int | None = None,
        tuning: Tuning = Tuning.REMEMBERED,
        clock: Clock | None = None,
        sensor: Sensor | None = None,
        resolve: Resolve = registry.resolve,
        external: ExternalKernels | None = None,
        rank_command: Sequence[str] = COMMAND,
    ) -> None:
        self._device = find_device(device)
        self.backend: Backend = "cpu" if self._device.type == "cpu" else "cuda"
        self._nvml = None if self.backend == "cpu" else open_handle(self._device)
        self.protocol = protocol or (PROTOCOL_CPU if self.backend == "cpu" else PROTOCOL_CUDA)
        self.seed = seed
        self.secret = secrets.randbits(_SECRET_BITS) if secret is None else secret
        self._clock = clock or (CpuClock() if self.backend == "cpu" else CudaClock(self._device))
        self.sensor = sensor or (NvmlSensor(self._nvml) if self._nvml else NoSensor())
        self._resolve = resolve
        self._external = external
        self._ranked = RankedCases(device, rank_command)
        finalize(self, self._ranked.end)
        self._tuning = tuning
        self._choices = tuning.memory()
        self._shared = SharedWeights(_SHARED_PERCENT * self.free_memory() // 100)
        self._specs: dict[str, KernelSpec] = {}
        self._probes: dict[tuple[object, ...], Measured] = {}
        self._measured_at = -math.inf
        self._free_mhz: float | None = None
        self._knows_free_mhz = False
        self.capability = capability(self._device)
        self.device_info: DeviceInfo = describe_device(self._device, self._nvml)

    def spec_of(self, case: Case) -> KernelSpec:
        """The spec of a case's kernel. Raises as memory_needed."""
        return self._find(case).spec

    def memory_needed(self, case: Case) -> int:
        """Bytes that preparing and placing the case takes, estimated without allocating.

        Raises MeasureError for an unknown kernel, UnsupportedError for one of another backend.
        """
        return self._estimate(self._find(case).spec, case, distinct=True).total

    def free_memory(self) -> int:
        """Bytes that can be allocated on the device now."""
        return available_memory(self._device)

    def forget_weights(self) -> None:
        """Free the weights that are kept for later cases."""
        self._shared.clear()
        self.release_memory()

    def free_mhz(self) -> float | None:
        """SM clock of the device without load, measured once; None: not available."""
        if not self._knows_free_mhz:
            self._free_mhz, self._knows_free_mhz = self._clock.free_mhz(), True
        return self._free_mhz

    def other_processes(self) -> int | None:
        """Number of other processes that compute on the device; None: not known."""
        self._clock.synchronize()  # the driver counts this process from its first use of the device
        return other_processes(self._nvml)

    def check_memory(self, case: Case) -> None:
        """Raise MeasureError if the case doesn't fit the free memory; allocate nothing.

        A case that this device can't run at all passes; its measurement reports the reason.
        """
        try:
            spec = self._find(case).spec
        except UnsupportedError:
            return
        estimate = self._estimate(spec, case, distinct=spec.is_external)
        estimate.check(self.free_memory(), case)

    def measure(self, case: Case) -> Measured:
        """Measure a case together with its floor and the empty launch.

        A kernel's own failure is a result: status unsupported, failed or incorrect with a detail.
        Raises MeasureError for an unknown kernel or a case that doesn't fit the memory, and
        InfrastructureError if the device stopped working before this case.
        """
        with self._clock.device_guard():
            self._check_health()
            if case.gpus == 1:
                self._ranked.end()
            measured = self._measure_alone(case)
            if measured.status in ("unsupported", "failed"):
                return measured
            with nullcontext() if self._external is None else self._external.paused():
                return self._with_probes(case, measured)

    def device_guard(self) -> AbstractContextManager[object]:
        """Make the device the current one, as `prepare` and the prepared case require."""
        return self._clock.device_guard()

    def prepare(
        self, case: Case, *, shares: bool = False, distinct: bool = True
    ) -> PreparedCase | RankedCase:
        """The case, ready to be configured, checked and placed step by step.

        shares: the weights of its layer are those of earlier cases, and kept for later ones.
        distinct: see Rewriting.

        Raises MeasureError for an unknown kernel, UnsupportedError if this device does not support
        the kernel, stage or cache mode, and any exception of the kernel.
        """
        kernel = self._find(case)
        self._check_supported(kernel.spec, case)
        if case.gpus > 1:
            return self._ranked.prepared(case, self.seed, self.secret)
        self._ranked.end()
        shared = self._shared if shares else SharedWeights(0)
        return self._prepare(kernel, case, shared, distinct=distinct)

    @property
    def torch_device(self) -> torch.device:
        """The device on which the buffers of cases are allocated."""
        return self._device

    @property
    def choices(self) -> TuningMemory:
        """The configurations chosen here, and those that others chose."""
        return self._choices

    @cached_property
    def environment(self) -> dict[str, str]:
        """Describe what affects times besides the device. To take a configuration needs none."""
        return describe_environment(self._device, self._nvml)

    @property
    def tuning_machine(self) -> TuningMachine:
        """The GPU and software that configurations chosen here are valid for."""
        libraries = (name for name in _TUNED_FOR if name in self.environment)
        software = " ".join(f"{name} {self.environment[name]}" for name in libraries)
        return TuningMachine(self.device_info.sku, software)

    def _find(self, case: Case) -> Kernel:
        try:
            return self._resolve(case.label, self.backend)
        except UnknownKernelError as error:
            raise MeasureError(str(error)) from error

    def _estimate(self, spec: KernelSpec, case: Case, *, distinct: bool) -> MemoryEstimate:
        cold = case.cache == "cold" and spec.reads_weights
        factor = self.protocol.cache_factor
        cold_bytes = self.protocol.cold_bytes(self.device_info.l2_bytes, factor) if cold else None
        return estimate_memory(spec, case, cold_bytes, distinct=distinct)

    def _check_health(self) -> None:
        try:
            self._clock.synchronize()
        except RuntimeError as error:
            raise InfrastructureError(
                f"{self._device} stopped working after an earlier kernel "
                f"({first_line(error)}): continue in a new process"
            ) from error

    def _measure_alone(self, case: Case) -> Measured:
        blank = Measured(
            status="unsupported",
            detail="",
            seed=self.seed,
            protocol_version=self.protocol.version,
            input_distribution="",
            regime=case.regime,
        )
        try:
            kernel = self._find(case)
            blank = blank.of_kernel(kernel.spec)
            self._check_supported(kernel.spec, case)
            estimate = self._estimate(kernel.spec, case, distinct=kernel.spec.is_external)
            if estimate.total > self.free_memory():
                self.forget_weights()
            estimate.check(self.free_memory(), case)
            return self._measure_kernel(kernel, case, blank)
        except (RefusedError, WorkerError) as error:  # of the process of an external kernel
            is_unsupported = isinstance(error, RefusedError) and error.is_unsupported
            status = "unsupported" if is_unsupported else "failed"
            return replace(blank, status=status, detail=error.reason)
        except FlexqError:
            raise
        except UnsupportedError as error:
            return replace(blank, detail=first_line(error))
        except Exception as error:  # a kernel may raise any exception, which is its result
            detail = f"{type(error).__name__}: {first_line(error)}"
            return replace(blank, status="failed", detail=detail)
        finally:
            self.release_memory()

    def _check_supported(self, spec: KernelSpec, case: Case) -> None:
        spec.check_capability(self.capability)
        if case.operation != spec.operation:
            raise UnsupportedError(f"{spec.label} computes {spec.operation}, not {case.operation}")
        if case.stage not in spec.stages:
            raise UnsupportedError(
                f"{spec.label} has no stage {case.stage!r}: it has {', '.join(spec.stages)}"
            )
        if case.gpus > 1 and self.backend == "cuda":
            present = len(device_infos(str(self._device), case.gpus))
            if present < case.gpus:
                raise UnsupportedError(
                    f"it needs {case.gpus} GPUs of a host, and {self._device} is the first of "
                    f"{present}: use --cluster, or another host"
                )

    def _measure_kernel(self, kernel: Kernel, case: Case, blank: Measured) -> Measured:
        steps = Steps()
        with ExitStack() as stack:
            with steps("prepare"):
                prepared = stack.enter_context(closing(self._prepared(kernel, case)))
            with steps("tune"):
                if self._tuning is Tuning.NONE:
                    prepared.use_default()
                else:
                    prepared.choose_config(self._choices, self.tuning_machine)
            with steps("check"):
                check = prepared.check("before")
            return self._sampled(prepared, case, blank, check, steps)

    def _sampled(
        self, prepared: Prepared, case: Case, blank: Measured, check: CheckResult, steps: Steps
    ) -> Measured:
        protocol = self.protocol
        telemetry = Telemetry(self.sensor, period_s=protocol.telemetry_period_s)
        launches: list[int] = []  # of a sample, by placement
        problems: list[str] = []

        @contextmanager
        def place(index: int) -> Iterator[Rotation]:
            with ExitStack() as stack:
                with steps("place"):
                    placed = stack.enter_context(prepared.placed(index))
                launches.append(placed.rotation.launches)
                with steps("sample"):
                    yield placed.rotation
                with steps("inspect"):
                    problems.append(placed.inspect())

        with telemetry:
            sampling = sample_case(
                place,
                protocol,
                telemetry,
                seed=self.seed,
                regime=case.regime,
                free_mhz=self.free_mhz(),
                warm=self._is_warm,
            )
        self._measured_at = time.monotonic()
        with steps("check"):
            check = check.merged(prepared.check("after"))
        check = check.merged(CheckResult(None, None, next(filter(None, problems), "")))
        status, detail = status_of(check, sampling, protocol)
        state = telemetry.summary()
        return replace(
            with_times(blank, sampling),
            status=status,
            detail=detail,
            input_distribution=prepared.input_distribution,
            max_rel_error=check.max_rel_error,
            exact=check.exact,
            config=prepared.config_values,
            binary_hash=prepared.binary_hash,
            sm_clock_mhz=sampling.sm_clock_mhz or state.sm_clock_mhz,
            mem_clock_mhz=state.mem_clock_mhz,
            power_w=sampling.power_w or state.power_w,
            temperature_c=state.temperature_c,
            throttle_mask=state.throttle_mask,
            extra=extra_facts(
                sampling,
                protocol,
                telemetry,
                copies=prepared.copies,
                launches=launches,
                secret=prepared.secret,
                other_processes=other_processes(self._nvml, prepared.processes),
                steps_s=steps.seconds,
                **(prepared.facts if isinstance(prepared, RankedCase) else {}),
            ),
            floor_us=prepared.floor_us if isinstance(prepared, RankedCase) else None,
        )

    def _prepared(self, kernel: Kernel, case: Case) -> Prepared:
        if isinstance(kernel, DescribedKernel) and self._external is not None:
            return self._external.prepared(kernel, case, self._device, self.protocol)
        if case.gpus > 1:
            return self._ranked.prepared(case, self.seed, self.secret)
        return self._prepare(kernel, case, self._shared, distinct=kernel.spec.is_external)

    def _prepare(
        self, kernel: Kernel, case: Case, shared: SharedWeights, *, distinct: bool
    ) -> PreparedCase:
        # A copy, made before the code of the kernel runs, which has the object too.
        spec = self._specs.setdefault(kernel.spec.label, deepcopy(kernel.spec))
        return PreparedCase(
            kernel,
            spec,
            case,
            self._device,
            self._clock,
            self.protocol,
            l2_bytes=self.device_info.l2_bytes,
            seed=self.seed,
            secret=self.secret,
            shared=shared,
            distinct=distinct,
            warm=self._is_warm,
        )

    @property
    def _is_warm(self) -> bool:
        """True if the last measurement ended less than `WARM_S` seconds ago."""
        return time.monotonic() - self._measured_at < WARM_S

    def _with_probes(self, case: Case, measured: Measured) -> Measured:
        """Add the floor of its weights and the empty launch to the result."""
        spec = self._find(case).spec
        launch = self._probe(EMPTY_KERNEL, case, measured)
        launch_us = launch.median_us if launch.is_comparable else None
        measured = replace(measured, launch_us=launch_us)
        if (spec.operation == "linear" and not spec.reads_weights) or case.gpus > 1:
            return measured  # the floor of several GPUs is that of their links
        floor, is_least = self._floor(spec, case, measured)
        if case.cache == "cold" and is_least and not is_probe(case.label):
            measured = judge_speed(measured, floor, launch_us or 0.0, self.protocol)
        return replace(measured, floor_us=floor.median_us if floor.is_comparable else None)

    def _floor(self, spec: KernelSpec, case: Case, measured: Measured) -> tuple[Measured, bool]:
        """The floor of a case, and whether no right launch can be faster."""
        if not isinstance(case.workload, OperationWorkload):
            label = floor_kernel(spec.weight.bits, overlaps=spec.overlaps_launches)
            return self._probe(label, case, measured), True
        of = OperationCase(case.workload, spec)
        floor_bytes = of.floor_bytes
        if not floor_bytes:
            return Measured("unsupported", "", self.seed, self.protocol.version, ""), False
        # Outputs, and inputs that are warm, need not cross the memory's interface: where they are
        # most of the bytes, the floor reads as many from the cache.
        streamed = min(floor_bytes, of.bytes_of(of.streamed(case.cache)))
        is_cold = case.cache == "cold" and 2 * streamed >= floor_bytes
        read = replace(
            case,
            workload=shape_of_bytes(streamed if is_cold else floor_bytes),
            stage="gemm",
            cache="cold" if is_cold else "hot",
        )
        # Launches of any kernel may overlap; no declaration says which do.
        label = floor_kernel(READ_BITS, overlaps=self.backend == "cuda")
        return self._probe(label, read, measured), is_cold and streamed == floor_bytes

    def _probe(self, label: str, case: Case, measured: Measured) -> Measured:
        """A probe at the case's shape, measured once a shape and cache mode."""
        shape = () if label == EMPTY_KERNEL else (case.gemm.n, case.gemm.k, case.cache)
        key = (label, measured.regime, *shape)
        if key not in self._probes:
            if case.label != label:
                measured = self._measure_probe(label, replace(case, regime=measured.regime))
            self._probes[key] = measured
        return self._probes[key]

    def _measure_probe(self, label: str, case: Case) -> Measured:
        kernel, variant = parse_kernel_label(label)
        gemm = case.gemm if case.operation == "linear" else GemmWorkload(1, 1, 1)
        probe_case = Case(kernel, gemm, variant=variant, cache=case.cache, regime=case.regime)
        try:
            return self._measure_alone(probe_case)
        except MeasureError as error:  # no probe of this width
            return Measured(
                "unsupported", str(error), self.seed, self.protocol.version, input_distribution=""
            )

    def release_memory(self) -> None:
        """Return freed buffers to the driver, for other processes and placements."""
        try:
            self._clock.release_memory()
        except RuntimeError:
            # The device is broken; the health check of the next measurement reports the reason.
            return


class Steps:
    """Seconds of wall time by step of a measurement."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[step] += time.perf_counter() - began

    @property
    def seconds(self) -> dict[str, float]:
        return {step: round(seconds, 4) for step, seconds in self._seconds.items()}
