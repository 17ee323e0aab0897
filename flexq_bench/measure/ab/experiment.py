"""An A/B experiment: its two sides, their workers, and the results of its cases.

`flexq_bench.measure.ab.course` measures its cases.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from flexq_bench.errors import BrokenRevisionError, InfrastructureError
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure.ab.blocks import CasePair, CaseSide, OnBlock
from flexq_bench.measure.ab.rules import InterleaveRules, OnProgress, OnResult
from flexq_bench.measure.ab.worker_command import worker_command
from flexq_bench.measure.ab.worker_pairs import Workers
from flexq_bench.measure.external_kernels import adopted, options_of
from flexq_bench.measure.launcher import ForkServer, Launcher
from flexq_bench.measure.sandbox import Sandbox
from flexq_bench.measure.worker_process import WorkerError, WorkerProcess
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.verdicts.alert_rule import FEWEST_PLACEMENTS
from flexq_bench.verdicts.confirmation import CORRECTED
from flexq_bench.workloads.case import Case

Identity = dict[str, Any]
_DEFAULT_RULES = InterleaveRules()
_WRONG_BEFORE = "both are wrong on the same inputs, so times are not compared"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: its name in results, and the folder whose code it runs.

    environment: its worker's; None: ours. kernels_from: sources of external kernels that its worker
    loads; None: those adopted in this process. launcher: starts its workers; None: each as a fresh
    process. sandbox: of the launcher; its private folders are emptied after each worker, when
    all of its processes end.
    """

    name: str
    tree: Path
    environment: Mapping[str, str] | None = None
    kernels_from: tuple[KernelSource, ...] | None = None
    launcher: Launcher | None = None
    sandbox: Sandbox | None = None

    def reset(self, *, keeps_caches: bool = True) -> None:
        """End what a worker left in its sandbox, but for what the first one compiled."""
        box = self.sandbox
        if box is not None and box.scratch and isinstance(self.launcher, ForkServer):
            caches = map(Path, box.caches if keeps_caches else ())
            self.launcher.reset(map(Path, box.scratch), caches)

    @property
    def short_name(self) -> str:
        """A commit's name for messages: ten digits."""
        sha, dash, rest = self.name.partition("-")
        return sha[:10] + dash + rest if len(sha) >= 40 else self.name

    @property
    def options(self) -> tuple[str, ...]:
        """Options of its worker besides device and seed."""
        sources = adopted().sources if self.kernels_from is None else self.kernels_from
        return options_of(sources)


class Options(TypedDict, total=False):
    """Options of every comparison; see ABExperiment."""

    device: str
    seed: int
    rules: InterleaveRules
    on_result: OnResult | None
    on_block: OnBlock | None
    on_progress: OnProgress | None
    command: Sequence[str] | None


def trusted_pair(base: Case, head: Case) -> CasePair:
    """A pair of cases whose workers are trusted."""
    return CasePair(CaseSide("base", base), CaseSide("head", head))


@dataclass(frozen=True, slots=True)
class ABExperiment:
    """An interleaved A/B measurement (ABBA) of two sides on one device.

    one_process: both run in the same worker. command: of a worker, without its options; None: the
    one of each side's tree. on_result, on_block: called with each result and each block as it
    comes, on_progress with the state of the whole comparison. pair: creates the CasePair that
    measures a pair of cases, base's and head's. starts_ahead: the next pair of workers starts while
    one measures; None: where that does not disturb it. False for code that is not trusted: it could
    run while the other side is measured. controls_base: before a case ends as not slower, base is
    measured where nothing of head runs, too.
    """

    base: Side
    head: Side
    rules: InterleaveRules = _DEFAULT_RULES
    device: str = "cuda"
    seed: int = 0
    one_process: bool = False
    command: Sequence[str] | None = None
    on_result: OnResult | None = None
    on_block: OnBlock | None = None
    on_progress: OnProgress | None = None
    pair: Callable[[Case, Case], CasePair] = trusted_pair
    starts_ahead: bool | None = None
    controls_base: bool = False

    def start(self, stack: ExitStack) -> Workers:
        """Start a pair of workers, which the stack ends. Raises as `identities`."""
        base = self.worker(stack, self.base)
        with _blamed_on_its_code():
            head = base if self.one_process else self.worker(stack, self.head)
        return base, head

    def identities(self, base: WorkerProcess, head: WorkerProcess) -> tuple[Identity, Identity]:
        """Check that the two can be compared; return what they say of themselves.

        Raises BrokenRevisionError if head's worker doesn't start or measures by another protocol,
        WorkerError if base's doesn't start, InfrastructureError if the two are not on one device.
        """
        for worker in dict.fromkeys((base, head)):
            worker.request_identity()  # both before a reply, so that they open the device together
        first = base.check_identity()
        with _blamed_on_its_code():
            second = first if self.one_process else head.check_identity()
        if first["device"] != second["device"]:
            raise InfrastructureError(
                f"the two don't share a device: {first['device']} and {second['device']}"
            )
        if first["protocol"] != second["protocol"]:
            raise BrokenRevisionError(
                f"{base.name} measures by protocol {first['protocol']} and {head.name} by "
                f"{second['protocol']}: their times are not comparable"
            )
        return first, second

    def worker(self, stack: ExitStack, side: Side) -> WorkerProcess:
        """Start a worker of a side, which the stack ends."""
        name = "the worker" if self.one_process else side.short_name
        command = worker_command(side.tree) if self.command is None else self.command
        worker = WorkerProcess(
            name,
            side.tree,
            (*command, "--device", self.device, "--seed", str(self.seed), *side.options),
            timeout_s=self.rules.timeout_s,
            environment=adopted().environment if side.environment is None else side.environment,
            launcher=side.launcher,
        )
        stack.callback(side.reset)  # after its end
        return stack.enter_context(worker)

    def result(self, pair: CasePair) -> CaseComparison:
        """Judge a case alone, by what was measured so far."""
        comparison = comparison_of(pair, by_process=self.rules.processes >= FEWEST_PLACEMENTS)
        return CaseComparison(
            case=pair.base.case,
            base=self.base.name,
            head=self.head.name,
            comparison=comparison,
            confirmation=confirm(comparison),
            base_binary=pair.base.binary,
            head_binary=pair.head.binary,
            base_config=pair.base.config or {},
            head_config=pair.head.config or {},
            detail=_detail(pair, self.base.short_name, self.head.short_name),
            sandbox="none" if self.head.sandbox is None else self.head.sandbox.kind,
        )


@contextmanager
def _blamed_on_its_code() -> Iterator[None]:
    """Convert the error of a worker on a device where another one has started: its code is the
    cause.
    """
    try:
        yield
    except WorkerError as error:
        raise BrokenRevisionError(str(error)) from error


def comparison_of(pair: CasePair, *, by_process: bool) -> Comparison:
    """The blocks of a case in the form that the statistics take.

    by_process: a pair of processes shares an offset; otherwise a placement does.
    """
    base, head = pair.base, pair.head
    # Of a case that ended early beside a wrong base, nothing is known, and where both are wrong on
    # the same inputs, there is no change.
    is_unknown = bool(pair.failure and base.wrong and not head.wrong) or pair.is_as_wrong
    blocks = [] if is_unknown else pair.blocks
    placements = sorted({(block.process, block.placement) for block in blocks})
    labels = {
        placement: placement[0] if by_process else number
        for number, placement in enumerate(placements)
    }
    base_mhz = tuple(block.base_mhz for block in blocks if block.base_mhz is not None)
    head_mhz = tuple(block.head_mhz for block in blocks if block.head_mhz is not None)
    all_known = len(base_mhz) == len(head_mhz) == len(blocks)
    same_binary = base.binary is not None and base.binary == head.binary
    return Comparison(
        base_us=tuple(block.base_us for block in blocks),
        head_us=tuple(block.head_us for block in blocks),
        placement=tuple(labels[block.process, block.placement] for block in blocks),
        base_mhz=base_mhz if all_known else None,
        head_mhz=head_mhz if all_known else None,
        cpu_wait=statistics.fmean(pair.cpu_waits) if pair.cpu_waits else 0.0,
        correct=is_unknown or (not head.wrong and (not base.wrong or pair.is_corrected)),
        base_correct=not pair.is_corrected,
        # Another configuration of the same code is different work.
        same_binary=same_binary and base.config == head.config,
        same_code=pair.same_code,
    )


def _detail(pair: CasePair, base: str, head: str) -> str:
    sides = ((base, pair.base), (head, pair.head))
    wrong = [f"{name}: {side.wrong}" for name, side in sides if side.wrong]
    if pair.failure:
        return "; ".join([pair.failure, *wrong])
    if pair.is_corrected:
        return "; ".join([CORRECTED, *wrong])
    if pair.is_as_wrong:
        return "; ".join([_WRONG_BEFORE, *wrong])
    if pair.base_is_wrong is False and pair.base.wrong and not pair.head.wrong:
        wrong.append(f"{base} is right where nothing of {head} runs")
    return "; ".join(wrong)
