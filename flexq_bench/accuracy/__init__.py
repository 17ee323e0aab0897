"""Accuracy: perplexity and tasks of a model under each scheme, compared with the original model.

An Evaluator executes an EvaluationPlan; each number is a MetricResult, and `difference` compares
two of them. Exported names are imported on first use, so that reading stored results does not
import torch. Other modules are imported directly: storing results (`accuracy.records`), evaluating
on a Ray cluster (`accuracy.ray_evaluation`), and preparing a run (`accuracy.setup`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError
    from flexq_bench.accuracy.evaluator import Evaluator
    from flexq_bench.accuracy.loading import LoadedModel, load_model
    from flexq_bench.accuracy.parity import SiteParity, kernel_parity
    from flexq_bench.accuracy.perplexity import PerplexityResult
    from flexq_bench.accuracy.plan import CalibrationPlan, EvaluationPlan
    from flexq_bench.accuracy.results import (
        FULL_PRECISION,
        KL,
        LAYER_ERROR,
        PERPLEXITY,
        TOP1,
        Difference,
        MetricResult,
        difference,
    )
    from flexq_bench.accuracy.tasks import check_tasks, task_name
    from flexq_bench.accuracy.texts import Text, read_text, tokenize

SUITE = "accuracy"  # suite name of runs of `accuracy`

__all__ = [
    "FULL_PRECISION",
    "KL",
    "LAYER_ERROR",
    "PERPLEXITY",
    "SUITE",
    "TOP1",
    "AccuracyError",
    "CalibrationPlan",
    "Difference",
    "EvaluationPlan",
    "Evaluator",
    "LoadedModel",
    "MetricResult",
    "MissingTaskError",
    "PerplexityResult",
    "SiteParity",
    "Text",
    "check_tasks",
    "difference",
    "kernel_parity",
    "load_model",
    "read_text",
    "task_name",
    "tokenize",
]

_MODULES = {
    "FULL_PRECISION": "results",
    "KL": "results",
    "LAYER_ERROR": "results",
    "PERPLEXITY": "results",
    "TOP1": "results",
    "AccuracyError": "errors",
    "CalibrationPlan": "plan",
    "Difference": "results",
    "EvaluationPlan": "plan",
    "Evaluator": "evaluator",
    "LoadedModel": "loading",
    "MetricResult": "results",
    "MissingTaskError": "errors",
    "PerplexityResult": "perplexity",
    "SiteParity": "parity",
    "Text": "texts",
    "check_tasks": "tasks",
    "difference": "results",
    "kernel_parity": "parity",
    "load_model": "loading",
    "read_text": "texts",
    "task_name": "tasks",
    "tokenize": "texts",
}


def __getattr__(name: str) -> Any:
    """Import an exported name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
