"""Evaluating on all devices of a Ray cluster at once, each worker a scheme after another.

Quantizing a model is the costly part of a unit, so a worker stays with its scheme as long as tasks
of it are left, and helps with another's only when no scheme is untouched. Findings are stored by
this process as they come; a worker that is lost costs the unit that it was at.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from db.engine import Database
from db.records import RunInfo
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.evaluator import EvaluationPlan
from flexq_bench.accuracy.records import OnUnit, Origin, Recording, Unit, recording
from flexq_bench.accuracy.results import Finding
from flexq_bench.accuracy.setup import prepare
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.fleet.ray_nodes import seats
from flexq_bench.fleet.ray_session import LOCAL, ray_session
from flexq_bench.fleet.retry_policy import MAX_DEATHS, is_quarantined
from flexq_bench.repository.provenance import current_commit
from kernels.contract import Backend

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker says when its model is loaded. parameters: of each unit of the plan."""

    origin: Origin
    parameters: Mapping[Unit, dict[str, Any]]


class EvaluatorActor:
    """Evaluates units of a plan on the device that Ray gave this process."""

    def __init__(
        self, backend: Backend, model: str, plan: EvaluationPlan, dtype: str | None, run: RunInfo
    ) -> None:
        if backend == "cpu":
            torch.set_num_threads(1)  # actors beside each other don't share cores
        self._device = "cpu" if backend == "cpu" else "cuda:0"  # Ray shows a process only its own
        self._asked = model, plan, dtype, run

    def introduce(self) -> Introduction:
        """Load the model. Raises UsageError as `prepare`."""
        model, plan, dtype, run = self._asked
        setup = prepare(model, plan, device=self._device, dtype=dtype, trigger=run.trigger, run=run)
        self._evaluator = setup.evaluator
        parameters = {unit: setup.evaluator.parameters(*unit) for unit in plan.units}
        return Introduction(setup.origin, parameters)

    def evaluate(self, unit: Unit) -> list[Finding]:
        """The findings of a unit. Raises UsageError as Evaluator.evaluate."""
        return self._evaluator.evaluate(*unit)


class Units:
    """What is left to evaluate, and who does what next."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._left = list(units)
        self._touched: set[str] = set()
        self._deaths: Counter[Unit] = Counter()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, at: str | None) -> Unit | None:
        """The next unit for a worker that has the model of scheme `at`; None: nothing is left."""
        if not self._left:
            return None
        left = Counter(scheme for scheme, _ in self._left)
        untouched = [scheme for scheme in left if scheme not in self._touched]
        scheme = at if at in left else None
        scheme = scheme or next(iter(untouched), None) or left.most_common(1)[0][0]
        self._touched.add(scheme)
        unit = next(unit for unit in self._left if unit[0] == scheme)
        self._left.remove(unit)
        return unit

    def put_back(self, unit: Unit) -> None:
        """A worker was lost with this unit. Raises InfrastructureError if it ended several."""
        self._deaths[unit] += 1
        if is_quarantined(self._deaths[unit]):
            raise InfrastructureError(
                f"{' on '.join(unit)} ended {MAX_DEATHS} workers, for want of memory perhaps: "
                "leave it out, or evaluate it without --cluster to see why"
            )
        self._left.insert(0, unit)


@dataclass(slots=True)
class _Worker:
    handle: Any
    host: str
    origin: Origin | None = None
    unit: Unit | None = None
    scheme: str | None = None


def execute_on_cluster(
    database: Database,
    model: str,
    plan: EvaluationPlan,
    run: RunInfo,
    *,
    address: str,
    backend: Backend | None,
    dtype: str | None,
    on_unit: OnUnit,
) -> list[Finding]:
    """Evaluate a plan on the workers of a cluster; findings in the plan's order.

    model: as find_model takes it, there on every machine of the cluster. backend None: GPUs if the
    cluster has any, else CPUs. What the run has already is not evaluated again. Raises UsageError
    as `prepare` and Recording.reusable, and InfrastructureError if there is no worker, one has
    other code or another model, or all are lost.
    """
    with ExitStack() as stack:
        stack.enter_context(ray_session(address, gpus=0 if backend == "cpu" else None))
        return _Drive(database, plan, on_unit, stack).go(
            _hire(address, backend, (model, plan, dtype, run), len(plan.units))
        )


def _hire(
    address: str, backend: Backend | None, arguments: tuple[object, ...], most: int
) -> list[_Worker]:
    import ray

    chosen = backend or ("cuda" if ray.cluster_resources().get("GPU", 0) else "cpu")
    places = seats(chosen, local=address == LOCAL)[:most]
    if not places:
        raise InfrastructureError(
            f"the cluster ({address}) has no GPU: give --device cpu, or add a node"
        )
    return [_Worker(place.create(EvaluatorActor, *arguments), place.host) for place in places]


class _Drive:
    """One evaluation by several workers."""

    def __init__(
        self, database: Database, plan: EvaluationPlan, on_unit: OnUnit, stack: ExitStack
    ) -> None:
        self._database, self._plan, self._on_unit = database, plan, on_unit
        self._stack = stack
        self._units = Units(())
        self._found: dict[Unit, list[Finding]] = {}
        self._kept: Recording | None = None
        self._first: Origin | None = None

    def go(self, workers: Sequence[_Worker]) -> list[Finding]:
        import ray

        waiting = {worker.handle.introduce.remote(): worker for worker in workers}
        idle: list[_Worker] = []
        reason = ""
        while waiting:
            (reference, *_), _ = ray.wait(list(waiting), num_returns=1)
            worker = waiting.pop(reference)
            try:
                self._take(worker, ray.get(reference))
                idle.append(worker)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UsageError | InfrastructureError):
                    raise error.cause from None
                raise
            except ray.exceptions.RayActorError as error:
                reason = f"{worker.host}: {str(error).strip().splitlines()[0]}"
                log.warning("lost a worker on %s", reason)
                if worker.unit is not None:
                    self._units.put_back(worker.unit)
            for free in list(idle):
                free.unit = self._units.take(free.scheme)
                if free.unit is not None:
                    idle.remove(free)
                    free.scheme = free.unit[0]
                    waiting[free.handle.evaluate.remote(free.unit)] = free
        if self._kept is None or len(self._units):
            raise InfrastructureError(f"all workers are lost, the last on {reason}")
        return [finding for unit in self._plan.units for finding in self._found[unit]]

    def _take(self, worker: _Worker, answer: Introduction | list[Finding]) -> None:
        if isinstance(answer, Introduction):
            self._welcome(worker, answer)
            return
        assert self._kept is not None
        assert worker.origin is not None
        assert worker.unit is not None
        self._kept.add(worker.unit, answer, worker.origin)
        self._done(worker.unit, answer)
        worker.unit = None

    def _welcome(self, worker: _Worker, introduced: Introduction) -> None:
        origin = introduced.origin
        commit = current_commit()
        if (origin.commit.sha, origin.commit.dirty) != (commit.sha, commit.dirty):
            raise InfrastructureError(
                f"{worker.host} has other code ({origin.commit.sha[:10]}) than this machine "
                f"({commit.sha[:10]}): install this commit there"
            )
        if self._first is not None and origin.model_hash != self._first.model_hash:
            raise AccuracyError(f"{worker.host} has another {origin.model}: copy the model there")
        worker.origin = origin
        if self._first is None:
            self._first = origin
            self._kept = self._stack.enter_context(recording(self._database, origin))
            self._reuse(self._kept, introduced.parameters)

    def _reuse(self, kept: Recording, parameters: Mapping[Unit, dict[str, Any]]) -> None:
        left = []
        for unit in self._plan.units:
            findings = kept.reusable(unit, parameters[unit])
            if findings:
                self._done(unit, findings)
            else:
                left.append(unit)
        self._units = Units(left)

    def _done(self, unit: Unit, findings: list[Finding]) -> None:
        self._found[unit] = findings
        self._on_unit(unit, findings)
