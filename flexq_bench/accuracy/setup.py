"""Preparation of an evaluation: from names given by a user to a loaded model and a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.errors import AccuracyError, DamagedModelError
from flexq_bench.accuracy.evaluator import Evaluator, default_through
from flexq_bench.accuracy.loading import LoadedModel, chosen_dtype, load_model
from flexq_bench.accuracy.plan import EvaluationPlan
from flexq_bench.accuracy.records import ResultOrigin
from flexq_bench.accuracy.references import ModelReference, ReferencePredictions
from flexq_bench.accuracy.results import Through
from flexq_bench.accuracy.stored_reference import StoredReference, is_stored_reference
from flexq_bench.accuracy.strata import STRATA
from flexq_bench.accuracy.tasks import ZERO_SHOT, check_chat_template, check_tasks
from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.db.records import RunInfo
from flexq_bench.errors import UsageError
from flexq_bench.measure.device import describe_device, describe_environment, find_device
from flexq_bench.measure.nvml import open_handle
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.schemes.model_files import CONFIG, find_model
from flexq_bench.schemes.registry import resolve
from flexq_bench.sweeps.text import split_names

PAPERS_TASKS = "zero-shot"  # short for all of ZERO_SHOT
log = logging.getLogger(__name__)
_LIBRARIES = ("transformers", "tokenizers", "lm_eval")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to be evaluated, with the origin of its results.

    warnings: possible mistakes in the settings of the evaluation.
    """

    plan: EvaluationPlan
    evaluator: Evaluator
    origin: ResultOrigin
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Subjects:
    """Schemes, checkpoint and original to evaluate; fields as in EvaluationPlan."""

    schemes: tuple[str, ...]
    checkpoint: str | None
    original: bool


def subjects(
    model: str,
    schemes: tuple[str, ...],
    checkpoint: str | None,
    *,
    default: tuple[str, ...],
) -> Subjects:
    """Determine what to evaluate: a model and its schemes or checkpoint, or a checkpoint alone.

    model: a checkpoint's folder is evaluated alone. schemes: they quantize in memory. checkpoint: a
    folder; None: there is none. default: the schemes if neither schemes nor a checkpoint are given.
    Raises UsageError if these contradict each other, DamagedModelError if the checkpoint is
    damaged.
    """
    if is_checkpoint(model):
        if checkpoint is not None:
            raise UsageError(
                f"--model {model} is a quantized checkpoint itself: give the original with "
                "--checkpoint"
            )
        if schemes:
            raise UsageError(
                f"{model} is quantized already: leave --schemes out, or give the original model"
            )
        return Subjects((_open(model).scheme.name,), model, original=False)
    if checkpoint is None:
        return Subjects(schemes or default, None, original=True)
    stored = _open(checkpoint).scheme.name
    if stored in schemes:
        raise UsageError(
            f"{checkpoint} is {stored} already: leave that out of the schemes, or the folder out"
        )
    return Subjects((*schemes, stored), checkpoint, original=True)


def named_tasks(text: str | None) -> tuple[str, ...]:
    """Parse a comma-separated list of tasks; `zero-shot` is short for the papers' six.

    Raises UsageError for a text without names.
    """
    names = split_names(text) or ()
    return tuple(
        task for name in names for task in (ZERO_SHOT if name == PAPERS_TASKS else (name,))
    )


def prepare(
    model: str,
    plan: EvaluationPlan,
    *,
    device: str | None,
    dtype: str | None,
    trigger: str,
    run: RunInfo | None = None,
    each_by_itself: bool = False,
    loading: AbstractContextManager[object] | None = None,
) -> PreparedModel:
    """Load the model, and check that everything in the plan exists.

    model: the original; if the plan has none, the folder of the plan's checkpoint. device None: the
    first GPU, else the CPU. run None: a new one. each_by_itself: a scheme without kernels is
    refused when it is evaluated and not here, so that others are evaluated. loading: a context that
    is entered while models are loaded, after all names were checked; None: no context. Raises
    UsageError before the evaluation if a device, model, scheme, text or task doesn't exist or
    doesn't fit, and DamagedModelError if a model is there and can't be loaded.
    """
    chosen = find_device(best_device() if device is None else device)
    chosen_dtype(dtype, chosen)
    checkpoint = None if plan.checkpoint is None else _open(plan.checkpoint)
    for name in plan.quantized if checkpoint is None else plan.quantized[:-1]:
        resolve(name)
    check_tasks(plan.tasks, plan.task_data)
    stored = _stored_reference(plan.reference)
    with loading or nullcontext():
        with reading(model):
            if checkpoint is None or plan.original:
                loaded = load_model(model, device=chosen, dtype=dtype)
            else:
                through = plan.through or default_through(chosen)
                loaded = load_checkpoint(checkpoint, device=chosen, through=through, dtype=dtype)
        if plan.tasks and plan.chat_template:
            check_chat_template(loaded)
        plan, reference = _with_reference(plan, stored, loaded, model)
        evaluator = Evaluator(loaded, plan, checkpoint, reference)
        if not each_by_itself:
            evaluator.check_kernels()
    warnings = evaluator.warnings()
    for warning in warnings:
        log.warning("%s: %s", loaded.name, warning)
    named = loaded.name, loaded.content_hash
    origin = describe_origin(*named, seed=plan.seed, device=chosen, run=run, trigger=trigger)
    return PreparedModel(plan, evaluator, origin, warnings)


def describe_origin(
    model: str,
    model_hash: str,
    *,
    seed: int,
    device: torch.device,
    trigger: str,
    run: RunInfo | None = None,
) -> ResultOrigin:
    """Describe a model's evaluation on this machine, at the current commit. run None: a new one."""
    handle = None if device.type == "cpu" else open_handle(device)
    return ResultOrigin(
        model=model,
        model_hash=model_hash,
        seed=seed,
        run=run or new_run(SUITE, trigger, ()),
        commit=current_commit(),
        device=describe_device(device, handle),
        environment=describe_environment(device, handle) | _versions(),
    )


@contextmanager
def reading(spec: str) -> Iterator[None]:
    """Raise DamagedModelError for a UsageError of the block if there is a model of this name."""
    try:
        yield
    except DamagedModelError:
        raise
    except UsageError as error:
        if isinstance(error.__cause__, PermissionError) or not _is_model(spec):
            raise
        raise DamagedModelError(str(error), spec) from error


def _is_model(spec: str) -> bool:
    """Return True if there is a model on this machine, of which a part may be damaged."""
    path = Path(os.path.expanduser(spec))
    return path.suffix == ".gguf" or (path / CONFIG).is_file() or any(path.glob("*.gguf"))


def _open(checkpoint: str) -> QuantizedCheckpoint:
    """Open a checkpoint. Raises DamagedModelError if it is damaged, UsageError if it is none."""
    if not is_checkpoint(checkpoint):
        return open_checkpoint(checkpoint)
    with reading(checkpoint):
        return open_checkpoint(checkpoint)


def _stored_reference(named: str | None) -> StoredReference | None:
    """Open a file of predictions; None: no reference is named, or it is a model.

    Raises UsageError or AccuracyError if it is neither, before a model is loaded.
    """
    if named is None:
        return None
    if is_stored_reference(named):
        return StoredReference(Path(named).expanduser())
    if not is_checkpoint(named):
        find_model(named)
    return None


def _with_reference(
    plan: EvaluationPlan, stored: StoredReference | None, loaded: LoadedModel, model: str
) -> tuple[EvaluationPlan, ReferencePredictions | None]:
    """Return the plan's reference, and the plan with the reference's context unless it has one."""
    named = plan.reference
    if named is None:
        return plan, None
    if stored is not None:
        given = [text for text in plan.texts if text.name not in STRATA]
        contexts = {stored.context(text) for text in given}
        if plan.context is not None:
            contexts.add(plan.context)
        if len(contexts) > 1:
            raise UsageError(
                f"{named} was stored with segments of "
                f"{min(map(stored.context, given))} tokens: ask for as many, or store it again"
            )
        fewest = min((stored.segments(text) for text in given), default=None)
        context = next(iter(contexts), None)
        if fewest is not None and context is not None:
            most = fewest * (context - 1)
            plan = replace(plan, max_tokens=min(plan.max_tokens or most, most))
        return replace(plan, context=context), stored
    through = plan.through or default_through(loaded.device)
    original = load_either(named, device=loaded.device, through=through, dtype=loaded.dtype)
    context = original.context(plan.context)
    try:
        loaded.context(context)
    except AccuracyError as error:  # fewer positions than the reference has
        raise DamagedModelError(str(error), model) from error
    return replace(plan, context=context), ModelReference(original, context=context, bos=plan.bos)


def load_either(
    named: str, *, device: torch.device, through: Through | None = None, dtype: str | None = None
) -> LoadedModel:
    """Load a checkpoint, as load_checkpoint does, or a model, as load_model.

    through: of a checkpoint; None: default_through. Raises DamagedModelError if it is there and
    can't be loaded, UsageError otherwise.
    """
    with reading(named):
        if not is_checkpoint(named):
            return load_model(named, device=device, dtype=dtype)
        through = through or default_through(device)
        return load_checkpoint(open_checkpoint(named), device=device, through=through, dtype=dtype)


def best_device() -> str:
    """Return the name of the first GPU, else of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _versions() -> dict[str, str]:
    """Return the versions of libraries that affect the model's results or its prompts."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
