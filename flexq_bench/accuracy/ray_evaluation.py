"""Evaluation on all devices of a Ray cluster; each worker evaluates one scheme after another.

Quantizing a model is the most expensive part of a unit. A worker therefore keeps its scheme until
the scheme has no tasks left, and joins another worker's scheme only if every scheme has been
started. Results are stored by this process as they arrive. If a worker is lost, only its current
unit has to be repeated; the worker is replaced.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.plan import EvaluationPlan
from flexq_bench.accuracy.records import OnUnit, Recording, ResultOrigin, Unit, recording
from flexq_bench.accuracy.results import MetricResult
from flexq_bench.accuracy.setup import prepare
from flexq_bench.db.engine import Database
from flexq_bench.db.records import RunInfo
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.fleet.ray_actors import Actor, RayActors
from flexq_bench.fleet.retry_policy import MAX_DEATHS, is_quarantined
from flexq_bench.fleet.timeouts import MAX_S, Times
from flexq_bench.fleet.workers import Finished, Joined, Lost
from flexq_bench.kernels.contract import Backend
from flexq_bench.repository.provenance import current_commit

_POLL_S = 0.5
_TIMES = Times(start=MAX_S)  # a worker is ready when it has loaded its model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Introduction:
    """Response of a worker after it has loaded its model. parameters: of each unit of the plan."""

    origin: ResultOrigin
    parameters: Mapping[Unit, dict[str, Any]]


class EvaluatorActor:
    """Evaluates units of a plan on the device that Ray assigned to this process."""

    def __init__(
        self, backend: Backend, model: str, plan: EvaluationPlan, dtype: str | None, run: RunInfo
    ) -> None:
        if backend == "cpu":
            torch.set_num_threads(1)  # actors on one host don't share cores
        self._device = "cpu" if backend == "cpu" else "cuda:0"  # Ray hides other GPUs
        self._asked = model, plan, dtype, run

    def introduce(self) -> Introduction:
        """Load the model. Raises UsageError as `prepare`."""
        model, plan, dtype, run = self._asked
        ready = prepare(model, plan, device=self._device, dtype=dtype, trigger=run.trigger, run=run)
        self._evaluator = ready.evaluator
        parameters = {unit: ready.evaluator.parameters(*unit) for unit in plan.units}
        return Introduction(ready.origin, parameters)

    def evaluate(self, unit: Unit) -> list[MetricResult]:
        """Return the results of a unit. Raises UsageError as Evaluator.evaluate."""
        return self._evaluator.evaluate(*unit)


@dataclass(slots=True)
class Evaluating:
    """A ready worker. unit: the one in progress; scheme: of the model in memory."""

    uuid: str
    host: str
    introduction: Introduction
    unit: Unit | None = None
    scheme: str | None = None


class RayEvaluators(RayActors):
    """Evaluators on a cluster. An exception of one evaluation ends all of them."""

    greeting = "introduce"
    no_gpu_advice = "give --device cpu, or add a node"

    def introduced(self, actor: Actor, answer: Any) -> Evaluating:
        return Evaluating(actor.uuid, actor.slot.host, answer)

    def _fail(self, actor: Actor, error: Exception) -> None:
        import ray

        if isinstance(error, ray.exceptions.RayTaskError):
            if isinstance(error.cause, UsageError | InfrastructureError):
                raise error.cause from None
            raise error
        super()._fail(actor, error)


class Units:
    """Units to evaluate, and their assignment to workers."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._left = list(units)
        self._touched: set[str] = set()
        self._deaths: Counter[Unit] = Counter()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, scheme_in_memory: str | None) -> Unit | None:
        """Take the next unit for a worker, if possible of its scheme; None: no unit is left."""
        if not self._left:
            return None
        left = Counter(scheme for scheme, _ in self._left)
        untouched = [scheme for scheme in left if scheme not in self._touched]
        scheme = scheme_in_memory if scheme_in_memory in left else None
        scheme = scheme or next(iter(untouched), None) or left.most_common(1)[0][0]
        self._touched.add(scheme)
        unit = next(unit for unit in self._left if unit[0] == scheme)
        self._left.remove(unit)
        return unit

    def put_back(self, unit: Unit, *, death: bool = True) -> None:
        """Return the unit of a lost worker. death: the unit may be the cause.

        Raises InfrastructureError if several workers died on the unit.
        """
        self._deaths[unit] += int(death)
        if is_quarantined(self._deaths[unit]):
            raise InfrastructureError(
                f"{' on '.join(unit)} killed {MAX_DEATHS} workers, perhaps by lack of memory: "
                "leave it out, or evaluate it without --cluster to see why"
            )
        self._left.insert(0, unit)


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
) -> list[MetricResult]:
    """Evaluate a plan on the workers of a cluster; returns results in the plan's order.

    model: as in find_model, available on every machine of the cluster. backend None: GPUs if the
    cluster has any, else CPUs. Results that the run already has are not repeated. Raises UsageError
    as `prepare` and Recording.reusable, and InfrastructureError if there is no worker, a worker has
    other code or another model, or all workers are lost.
    """
    evaluators = RayEvaluators(
        address,
        EvaluatorActor,
        model,
        plan,
        dtype,
        run,
        backend=backend,
        times=_TIMES,
        most=len(plan.units),
    )
    with ExitStack() as stack:
        stack.enter_context(evaluators)
        return Evaluation(database, plan, on_unit, stack).carry_out(evaluators)


class Evaluation:
    """Evaluation of a plan by several workers. stack: the context in which the run is opened."""

    def __init__(
        self, database: Database, plan: EvaluationPlan, on_unit: OnUnit, stack: ExitStack
    ) -> None:
        self._database, self._plan, self._on_unit = database, plan, on_unit
        self._stack = stack
        self._workers: dict[str, Evaluating] = {}
        self._units = Units(())
        self._findings: dict[Unit, list[MetricResult]] = {}
        self._recording: Recording | None = None
        self._first: ResultOrigin | None = None

    def carry_out(self, evaluators: RayEvaluators) -> list[MetricResult]:
        """Evaluate until every unit has results. Raises as execute_on_cluster."""
        reason = ""
        while len(self._findings) < len(self._plan.units):
            for event in evaluators.poll(_POLL_S):
                if isinstance(event, Joined):
                    self._add_worker(event.worker)
                elif isinstance(event, Finished):
                    self._take(self._workers[event.worker], event.answer)
                else:
                    reason = self._remove(event)
            for worker in self._workers.values():
                if worker.unit is None:
                    worker.unit = self._units.take(worker.scheme)
                    if worker.unit is not None:
                        worker.scheme = worker.unit[0]
                        evaluators.call(worker.uuid, "evaluate", worker.unit)
            if not self._workers and not evaluators.arriving:
                if reason:
                    raise InfrastructureError(f"all workers are lost, the last on {reason}")
                reasons = "; ".join(evaluators.refusals) or "it has no devices"
                raise InfrastructureError(f"no worker started on this cluster: {reasons}")
        return [finding for unit in self._plan.units for finding in self._findings[unit]]

    def _take(self, worker: Evaluating, findings: list[MetricResult]) -> None:
        assert self._recording is not None
        assert worker.unit is not None
        self._recording.add(worker.unit, findings, worker.introduction.origin)
        self._done(worker.unit, findings)
        worker.unit = None

    def _remove(self, lost: Lost) -> str:
        """Put back the unit of a lost worker; returns the worker's host and the reason."""
        worker = self._workers.pop(lost.worker)
        reason = f"{worker.host}: {lost.reason}"
        log.warning("lost a worker on %s", reason)
        if worker.unit is not None:
            self._units.put_back(worker.unit, death=not lost.blameless)
        return reason

    def _add_worker(self, worker: Evaluating) -> None:
        origin = worker.introduction.origin
        commit = current_commit()
        if (origin.commit.sha, origin.commit.dirty) != (commit.sha, commit.dirty):
            raise InfrastructureError(
                f"{worker.host} has other code ({origin.commit.sha[:10]}) than this machine "
                f"({commit.sha[:10]}): install this commit there"
            )
        if self._first is not None and origin.model_hash != self._first.model_hash:
            raise AccuracyError(f"{worker.host} has another {origin.model}: copy the model there")
        self._workers[worker.uuid] = worker
        if self._first is None:
            self._first = origin
            self._recording = self._stack.enter_context(recording(self._database, origin))
            self._reuse(self._recording, worker.introduction.parameters)

    def _reuse(self, stored: Recording, parameters: Mapping[Unit, dict[str, Any]]) -> None:
        missing = []
        for unit in self._plan.units:
            findings = stored.reusable(unit, parameters[unit])
            if findings:
                self._done(unit, findings)
            else:
                missing.append(unit)
        self._units = Units(missing)

    def _done(self, unit: Unit, findings: list[MetricResult]) -> None:
        self._findings[unit] = findings
        self._on_unit(unit, findings)
