"""Accuracy record: one metric of one task of a model under a quantization scheme.

Self-contained like Record. In a results file its `kind` distinguishes it from other records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexq_bench.db.records import SCHEMA_VERSION, CommitInfo, DeviceInfo, RunInfo

ACCURACY_STATUSES = (
    "ok",  # evaluated
    "failed",  # evaluation raised, or the metric is not finite; see detail
)
THROUGH = (
    "reference",  # dequantized weights, activations rounded in torch
    "kernels",  # every quantized layer runs its kernel
)


@dataclass(frozen=True, slots=True)
class AccuracyRecord:
    """One metric of one task of a model under a scheme."""

    uuid: str  # uuid5 of run uuid, scheme, task and metric: equal in every database
    model: str
    model_hash: str  # of the loaded files
    scheme: str  # "fp16": the unquantized model
    task: str  # for example wikitext, piqa
    task_version: str
    data_hash: str  # of the evaluation data
    metric: str  # for example perplexity, acc
    direction: str  # "lower" | "higher": which way is better
    status: str  # one of ACCURACY_STATUSES
    detail: str  # reason if the status is not ok; empty otherwise
    value: float | None  # None: not evaluated, see status and detail
    standard_error: float | None  # None: not reported by the task
    n_items: int  # tokens or questions
    values: tuple[float, ...]  # per segment or question, in order; empty: not reported
    seed: int
    parameters: dict[str, Any]  # of quantization and evaluation
    created_at: str
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    through: str = "reference"  # one of THROUGH; the unquantized model has "reference"
    content_hash: str | None = None  # of the evaluated checkpoint; None: fp16, or unknown
    scheme_version: int | None = None  # None: fp16, or not recorded
    # Position of the BOS token: segment, text, none. None: not a text task, or not recorded.
    bos: str | None = None
    schema_version: int = SCHEMA_VERSION
