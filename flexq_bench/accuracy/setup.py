"""From what a person named to a model that is loaded and a run that can begin."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from db.records import RunInfo
from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.evaluator import EvaluationPlan, Evaluator
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.records import Origin
from flexq_bench.accuracy.tasks import ZERO_SHOT, check_tasks
from flexq_bench.measure.device import describe_device, describe_environment, find_device
from flexq_bench.measure.nvml import open_handle
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.schemes.registry import resolve

PAPERS_TASKS = "zero-shot"  # stands for all of ZERO_SHOT
_LIBRARIES = ("transformers", "tokenizers", "lm_eval")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to be evaluated, with the origin of its results."""

    plan: EvaluationPlan
    evaluator: Evaluator
    origin: Origin


def named_tasks(text: str | None) -> tuple[str, ...]:
    """The tasks of a comma-separated list; `zero-shot` stands for the papers' six."""
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
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
) -> PreparedModel:
    """Load the model and see that everything that the plan names is there.

    device None: the first GPU, else the CPU. run None: a new one. Raises UsageError for a device,
    model, scheme, text or task that isn't there or doesn't fit, before anything is evaluated.
    """
    chosen = find_device(device or best_device())
    for name in plan.quantized:
        resolve(name)
    check_tasks(plan.tasks, plan.task_data)
    loaded = load_model(model, device=chosen, dtype=dtype)
    evaluator = Evaluator(loaded, plan)
    handle = None if chosen.type == "cpu" else open_handle(chosen)
    origin = Origin(
        model=loaded.name,
        model_hash=loaded.content_hash,
        seed=plan.seed,
        run=run or new_run(SUITE, trigger, ()),
        commit=current_commit(),
        device=describe_device(chosen, handle),
        environment=describe_environment(chosen, handle) | _versions(),
    )
    return PreparedModel(plan, evaluator, origin)


def best_device() -> str:
    """The first GPU's name, else the CPU's."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _versions() -> dict[str, str]:
    """The versions of the libraries that decide what a model computes or is asked."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
