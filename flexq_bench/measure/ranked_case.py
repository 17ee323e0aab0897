"""Cases of several GPUs, measured by one process on each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.clocks import Batch, Rotation
from flexq_bench.measure.device import devices_from
from flexq_bench.measure.given_inputs import Plain
from flexq_bench.measure.operation_inputs import OPERATION_DISTRIBUTION
from flexq_bench.measure.program import program_root
from flexq_bench.measure.rank_processes import RankProcesses
from flexq_bench.measure.rank_worker import COMMAND
from flexq_bench.measure.worker_process import RefusedError, WorkerError
from flexq_bench.workloads.case import Case

_TIMEOUT_S = 300.0  # of a request


class RankedCases:
    """The processes of the ranks, which are kept for the next case of as many GPUs.

    device: of the first. command: of each process, with the options of its kernels.
    """

    def __init__(self, device: str, command: Sequence[str] = COMMAND) -> None:
        self._device, self._command = device, command
        self._ranks: RankProcesses | None = None
        self._count = 0

    def prepared(self, case: Case, seed: int, secret: int) -> RankedCase:
        """The case. Raises WorkerError if a rank does not start."""
        if self._ranks is None or self._ranks.is_broken or self._count != case.gpus:
            self.end()
            devices = devices_from(self._device, case.gpus)
            self._ranks = RankProcesses(
                "rank", program_root(), self._command, devices, timeout_s=_TIMEOUT_S
            )
            self._count = case.gpus
        return RankedCase(self._ranks, case, seed, secret)

    def end(self) -> None:
        """End the processes, which hold memory of the GPUs."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks, self._count = None, 0


class _OwnBuffers:
    """Stands for buffers that the ranks have, and share with no other case."""

    def __init__(self) -> None:
        self.weights = object()


class RankedCase:
    """Counterpart of `PreparedCase`. Raises RefusedError and WorkerError.

    floor_us: time of the bytes that cross the links at the rate of a large exchange. facts: to be
    stored with the result.
    """

    input_distribution = OPERATION_DISTRIBUTION
    processes = 2
    format_names: Mapping[str, str] = {}  # its ranks know them

    def __init__(self, ranks: RankProcesses, case: Case, seed: int, secret: int) -> None:
        self._ranks, self.secret = ranks, secret
        uuids = [reply["uuid"] for reply in ranks.ask("describe")]
        first, *_ = ranks.ask("prepare", case=case.key, seed=seed, secret=secret)
        self.copies = int(first["launches"])
        self.floor_us: float | None = first["floor_us"]
        self.facts = {"devices": uuids, "link_gb_s": round(first["link_gb_s"], 2)}
        self.config_values: dict[str, Any] = {}
        self.config: None = None
        self.binary_hash: str | None = None

    def choose_config(self, *_: object, **__: object) -> None:
        """There is only one."""

    def use_default(self) -> None:
        """There is only one."""

    def use_config(self, _: object) -> None:
        """There is only one."""

    def assume_launches(self, _: int) -> None:
        """Their number does not depend on times."""

    def buffers(self, index: int, *, weights: object = None) -> _OwnBuffers:
        """`placed` allocates them."""
        return _OwnBuffers()

    def check(self, when: str) -> CheckResult:
        """Check whole results of every rank."""
        result = CheckResult(None, None)
        for reply in self._ranks.ask("check", when=when):
            result = result.merged(
                CheckResult(reply["max_rel_error"], reply["exact"], reply["detail"])
            )
        return result

    @contextmanager
    def placed(self, index: int) -> Iterator[RankedPlacement]:
        """Placement `index`."""
        self._ranks.ask("place", index=index)
        yield RankedPlacement(RankRotation(self._ranks, self.copies), self._ranks)

    def close(self) -> None:
        """Free what the ranks have of the case."""
        with suppress(RefusedError, WorkerError):  # it may be the reason
            self._ranks.ask("release")


class RankRotation(Rotation):
    """Launches of all ranks; a sample lasts as long as that of the slowest."""

    def __init__(self, ranks: RankProcesses, launches: int) -> None:
        self._ranks, self.launches = ranks, launches
        self._untimed = 0

    def keep_samples(self, count: int) -> None:
        """Take so many samples without times before the next ones."""
        self._untimed = count

    def sample(self, count: int, *, gap_us: float | None = 0.0) -> Batch:
        untimed, self._untimed = self._untimed, 0
        replies = self._ranks.ask("sample", count=untimed + count)
        times = zip(*(reply["times_us"][untimed:] for reply in replies), strict=True)
        return Batch(tuple(map(max, times)), (None,) * count)

    def close(self) -> None:
        """The ranks free their buffers."""


@dataclass(frozen=True, slots=True)
class RankedPlacement:
    """A placement of all ranks."""

    rotation: RankRotation
    _ranks: RankProcesses

    @property
    def failed(self) -> None:
        """Ranks don't know which inputs a wrong launch had."""

    def inspect(self) -> str:
        """Describe errors in outputs of launches like the timed ones; empty: none."""
        details = (str(reply["detail"]) for reply in self._ranks.ask("inspect"))
        return next(filter(None, details), "")

    def fill(self, path: str, layout: list[list[Any]], plain: Plain) -> None:
        """Give a judge's inputs, in shared memory, to the last launch of each sample."""
        self._ranks.ask("fill", path=path, layout=layout, plain=plain)

    def output(self, path: str) -> None:
        """Write the results of the latest last launch."""
        self._ranks.ask("output", path=path)
