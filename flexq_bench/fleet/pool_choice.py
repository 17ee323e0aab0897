"""Selection of a pool: this process, or the workers of a Ray cluster."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.fleet.local_pool import LocalPool, registered_worker
from flexq_bench.fleet.pool import Pool
from flexq_bench.fleet.ray_pool import RayPool
from flexq_bench.fleet.ray_workers import RayWorkers
from flexq_bench.fleet.shipped_kernels import ship_kernels
from flexq_bench.fleet.timeouts import parse_times
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure.device import device_info
from flexq_bench.measure.device_lock import device_alone
from flexq_bench.measure.external_kernels import adopted
from flexq_bench.measure.kernel_processes import ProcessOptions
from flexq_bench.measure.local_devices import local_devices
from flexq_bench.measure.protocol import protocol_of
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.runs.process_meter import InProcessMeter, ProcessMeter

NO_CLUSTER = "none"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of where and how to measure.

    project: of the commits; None: this repository. revision: of it, which is measured. cluster:
    "none" for this process, "local" or a Ray address. backend None: CUDA if there is a GPU, else
    CPU. device: of this process, as named by torch; None: the backend's first. seed None: the seed
    of the resumed run, or 0. times: as in `--times`, None for the defaults; without a cluster they
    apply to the processes that measure external kernels. brief: see protocol_of; not on a cluster.

    For a cluster only: gpus, SKUs or globs, empty for every kind; repeat, the number of
    measurements of each case, on different GPUs of its kind if there are several.
    """

    cluster: str = NO_CLUSTER
    backend: Backend | None = None
    device: str | None = None
    seed: int | None = None
    tuning: Tuning = Tuning.REMEMBERED
    gpus: tuple[str, ...] = ()
    repeat: int = 1
    times: str | None = None
    project: Project | None = None
    revision: ProjectRevision | None = None
    brief: bool = False

    def __post_init__(self) -> None:
        if not self.cluster.strip():
            raise UsageError("--cluster names nothing: write none, local, auto or ray://HOST:10001")
        parse_times(self.times)  # reports a wrong name even if the times are not used

    @property
    def is_local(self) -> bool:
        """True if this process measures, not a cluster."""
        return self.cluster == NO_CLUSTER


@contextmanager
def open_pool(
    database: Database, options: PoolOptions, commit: CommitInfo, *, registers: bool = False
) -> Iterator[Pool]:
    """Open the pool that the options select.

    commit: of the code that measures. registers: register this process as a worker in the database
    during the block; workers of a cluster always are. Raises UsageError if options contradict each
    other, DeviceError if there is no such device, InfrastructureError if no worker of the cluster
    starts.
    """
    with ExitStack() as stack:
        if options.is_local:
            pool = stack.enter_context(_local_pool(database, options))
            if registers:
                stack.enter_context(registered_worker(database, pool.worker))
            yield pool
            return
        if options.brief:
            raise UsageError("--brief is for a device of this process: leave --cluster out")
        if options.device is not None:
            raise UsageError(
                "--device picks a device of this process: leave it out with --cluster, which uses "
                "all"
            )
        times = parse_times(options.times)
        workers = RayWorkers(
            options.cluster,
            backend=options.backend,
            seed=options.seed or 0,
            tuning=options.tuning,
            times=times,
            kernels=partial(
                ship_kernels, adopted().sources, options.project, options.revision, times
            ),
            project=options.project,
        )
        pool_of_cluster = RayPool(
            database, workers, commit, times, gpus=options.gpus, repeat=options.repeat
        )
        yield stack.enter_context(pool_of_cluster.opened())


def _refuse_drained(database: Database, device: DeviceInfo) -> None:
    """Raise InfrastructureError if this host or the device is drained."""
    with database.session() as session:
        for row in queries.drains(session):
            if row.target in (platform.node(), device.uuid):
                raise InfrastructureError(
                    f"{row.target} is drained ({row.reason}): flexq-bench fleet resume {row.target}"
                )


def _others_of_its_kind(database: Database, name: str, options: PoolOptions) -> list[str]:
    """Further GPUs of this machine that may compare: none if the options name a device."""
    if options.device is not None or name == "cpu":
        return []
    with database.session() as session:
        drained = {row.target for row in queries.drains(session)}
    sku = device_info(name).sku
    _, *others = [each for each in local_devices() if each[1].sku == sku]
    return [other for other, info in others if info.uuid not in drained]


def device_name(backend: Backend | None, device: str | None) -> str:
    """The requested device, else the backend's first, else a GPU if there is one, else the CPU.

    Raises UsageError if the device is not of the backend.
    """
    if device is not None:
        if backend is not None and not device.startswith(backend):
            raise UsageError(f"--device {device} is not of --backend {backend}: drop one of them")
        return device
    if backend is not None:
        return backend
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _local_pool(database: Database, options: PoolOptions) -> Iterator[LocalPool]:
    if options.gpus or options.repeat > 1:
        raise UsageError(
            "--gpus and --repeat are for a cluster: add --cluster local, or leave them out"
        )
    device, seed = device_name(options.backend, options.device), options.seed or 0
    info = device_info(device)
    protocol = protocol_of(device.partition(":")[0], brief=options.brief)
    _refuse_drained(database, info)
    others = _others_of_its_kind(database, device, options)
    if not registry.external_labels():
        # A meter allocates device memory, which would disturb a measurement by another process.
        with device_alone(info.uuid):
            meter = Meter(device, protocol, seed=seed, tuning=options.tuning)
        yield LocalPool(database, InProcessMeter(meter), device, others=others)
        return
    times = parse_times(options.times)
    kernels = adopted()
    limits = (times.start, times.case)
    processes = ProcessOptions(device, seed, options.tuning, *limits, kernels.environment)
    with ExitStack() as stack:
        with device_alone(info.uuid):
            measurer = stack.enter_context(ProcessMeter(processes, kernels, protocol))
        yield LocalPool(database, measurer, device, options.project, others)
