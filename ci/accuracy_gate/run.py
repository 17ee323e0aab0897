"""A whole gate, from the names that a user gives to the stored records of its decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flexq_bench.accuracy.approved import ApprovedReference
from flexq_bench.accuracy.errors import DamagedModelError
from flexq_bench.accuracy.loading import suitable_threads
from flexq_bench.accuracy.plan import CalibrationPlan, EvaluationPlan
from flexq_bench.accuracy.records import OnUnit, ResultOrigin
from flexq_bench.accuracy.results import FULL_PRECISION, ORIGINAL, REFERENCE, Through
from flexq_bench.accuracy.setup import (
    PreparedModel,
    best_device,
    describe_origin,
    prepare,
    subjects,
)
from flexq_bench.accuracy.texts import Text
from flexq_bench.checkpoints.folders import is_checkpoint, read_config
from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy, ModelFolders
from flexq_bench.ci.accuracy_gate.gate import (
    AccuracyReport,
    approve,
    gate_accuracy,
    gate_records,
    judge_unloaded,
    planned_evaluation,
)
from flexq_bench.ci.notifications.events import add_accuracy_gate_events
from flexq_bench.db.engine import Database
from flexq_bench.db.store import add_records
from flexq_bench.errors import UsageError
from flexq_bench.measure.device import find_device
from flexq_bench.schemes.model_files import hash_of_damaged

Progress = Callable[[PreparedModel], AbstractContextManager[tuple[OnUnit, Callable[[str], None]]]]


@dataclass(frozen=True, slots=True)
class GateRequest:
    """A request for a gate: names as of the command's options, None as of `prepare`.

    schemes: to judge; empty: the policy's, or none with a checkpoint or a reference. base: the
    scheme to compare with; None: the policy's. approved: an ApprovedReference for the checkpoint.
    approve: file to write one to, in the name of the approver.
    """

    model: str
    texts: Sequence[Text] = ()
    schemes: tuple[str, ...] = ()
    checkpoint: str | None = None
    reference: str | None = None
    base: str | None = None
    task_data: Path | None = None
    batch: int = 8
    calibration: CalibrationPlan | None = None
    seed: int = 0
    through: Through | None = None
    device: str | None = None
    dtype: str | None = None
    approved: Path | None = None
    approve: Path | None = None
    approver: str = ""

    @property
    def folders(self) -> ModelFolders:
        """The folders that are named; see ModelFolders."""
        judged = self.checkpoint or (None if self.reference is None else self.model)
        original = self.model if self.reference is None else self.reference
        return ModelFolders(_folder(judged), _folder(original))

    def is_judged(self, spec: str) -> bool:
        """Return True for the name of the model or checkpoint that is judged."""
        return spec == (self.checkpoint or self.model)


def _folder(name: str | None) -> Path | None:
    path = None if name is None else Path(name).expanduser()
    is_model = path is not None and (path.is_dir() or path.suffix == ".gguf")
    return path if is_model else None


def run_gate(
    policy: AccuracyPolicy,
    request: GateRequest,
    database: Database,
    *,
    loading: AbstractContextManager[object],
    progress: Progress,
    diagnose: bool = True,
    quick: bool = False,
) -> AccuracyReport:
    """Evaluate what is requested, judge it, and store results and decision.

    loading: a context in which models are loaded; progress: one in which they are evaluated, with
    on_unit and on_activity of gate_accuracy. quick: a first opinion, which is not stored. A model
    that can't be loaded fails; a reference that can't be makes its checks not judged. Raises
    UsageError for a request that makes no sense, such as a model that is not there.
    """
    try:
        report, origin = _judged(
            policy, request, database, loading=loading, progress=progress, diagnose=diagnose,
            quick=quick,
        )  # fmt: skip
    except DamagedModelError as error:
        report, origin = _unloaded(policy, request, error)
    if not quick:
        decided = gate_records(report, policy, origin, at=datetime.now(UTC))
        with database.session() as session:
            add_records(session, decided)
            add_accuracy_gate_events(session, decided)
    return report


def _judged(
    policy: AccuracyPolicy,
    request: GateRequest,
    database: Database,
    *,
    loading: AbstractContextManager[object],
    progress: Progress,
    diagnose: bool,
    quick: bool,
) -> tuple[AccuracyReport, ResultOrigin]:
    judged, compared, plan, absent = _planned(policy, request)
    approved = _approvals(request, plan, quick=quick)
    with loading:
        setup = prepare(
            request.model,
            plan,
            device=request.device,
            dtype=request.dtype,
            trigger="gate",
            each_by_itself=True,
        )
    with suitable_threads(setup.evaluator.loaded), progress(setup) as (on_unit, on_activity):
        report = gate_accuracy(
            *(policy, setup, database, judged, compared, absent),
            on_unit=on_unit,
            diagnose=diagnose,
            folders=request.folders,
            quick=quick,
            on_activity=on_activity,
            approved=approved,
        )
        if request.approve is not None:
            approve(report, setup, request.approver, datetime.now(UTC)).write(request.approve)
    return report, setup.origin


def _approvals(
    request: GateRequest, plan: EvaluationPlan, *, quick: bool
) -> ApprovedReference | None:
    """Return the approved reference. Raises UsageError if a request to approve makes no sense."""
    if plan.checkpoint is None and (request.approve or request.approved) is not None:
        raise UsageError("a checkpoint is approved, not a scheme: give its folder")
    if request.approve is not None and (quick or not request.approver):
        raise UsageError("--approve needs --approver NAME, and all of the gate instead of --quick")
    return None if request.approved is None else ApprovedReference.read(request.approved)


def _planned(
    policy: AccuracyPolicy, request: GateRequest
) -> tuple[tuple[str, ...], str, EvaluationPlan, dict[str, str]]:
    """Return the schemes to judge, their base, the plan, and what of the policy is missing."""
    model, reference = request.model, request.reference
    if reference is None and is_checkpoint(model):
        raise UsageError(
            f"--model {model} is a quantized checkpoint: give it with --checkpoint, and the model "
            "that it was made from with --model; or that with --reference"
        )
    if reference is not None and request.base is not None:
        raise UsageError("--reference and --base are two things to compare with: leave one out")
    default = policy.schemes if reference is None else ()
    subject = subjects(model, request.schemes, request.checkpoint, default=default)
    as_it_is = (FULL_PRECISION,) if reference is not None and subject.original else ()
    judged = tuple(dict.fromkeys((*as_it_is, *subject.schemes)))
    compared = ORIGINAL if reference is not None else request.base or policy.base
    plan, absent = planned_evaluation(
        policy,
        judged,
        compared,
        request.texts,
        request.task_data,
        batch=request.batch,
        calibration=request.calibration,
        seed=request.seed,
        through=request.through,
        checkpoint=subject.checkpoint,
        original=subject.original,
        reference=reference,
    )
    return judged, compared, plan, absent


def _unloaded(
    policy: AccuracyPolicy, request: GateRequest, error: DamagedModelError
) -> tuple[AccuracyReport, ResultOrigin]:
    """Return the report of a gate whose model, or reference, can't be loaded."""
    path = Path(request.model).expanduser()
    origin = describe_origin(
        path.resolve().name,
        hash_of_damaged(path),
        seed=request.seed,
        device=find_device(request.device or best_device()),
        trigger="gate",
    )
    quantized = request.checkpoint or (request.model if is_checkpoint(request.model) else None)
    schemes = [*request.schemes, *([] if quantized is None else [_scheme_of(quantized)])]
    default = policy.schemes if request.reference is None else (FULL_PRECISION,)
    report = judge_unloaded(
        policy,
        origin,
        schemes or default,
        ORIGINAL if request.reference is not None else request.base or policy.base,
        request.folders,
        str(error),
        is_judged=request.is_judged(error.spec),
        reference=request.reference and Path(request.reference).expanduser().resolve().name,
        through=request.through or REFERENCE,
    )
    return report, origin


def _scheme_of(checkpoint: str) -> str:
    """Return the name of a checkpoint's scheme; of a damaged one, what its configuration says."""
    _, section = read_config(checkpoint)
    own = section.get("flexq_bench") if isinstance(section, dict) else None
    scheme = own.get("scheme") if isinstance(own, dict) else None
    name = scheme.get("name") if isinstance(scheme, dict) else None
    method = section.get("quant_method") if isinstance(section, dict) else None
    return str(name or method or "checkpoint")
