"""The accuracy record: one metric of one task of a model under a scheme, self-contained as Record.

In files of results it stands among the others, told apart by its `kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from db.records import SCHEMA_VERSION, CommitInfo, DeviceInfo, RunInfo

ACCURACY_STATUSES = (
    "ok",  # evaluated
    "failed",  # it raised, or the metric is not a finite number; the detail says what
)
THROUGH = (
    "reference",  # dequantized weights, activations rounded in torch
    "kernels",  # every quantized layer computed by its kernel
)


@dataclass(frozen=True, slots=True)
class AccuracyRecord:
    """One metric of one task of a model under a scheme."""

    uuid: str  # uuid5 of run uuid, scheme, task and metric: the same record everywhere
    model: str
    model_hash: str  # of the files that were loaded
    scheme: str  # "fp16": the model as it is
    task: str  # for example wikitext, piqa
    task_version: str
    data_hash: str  # of what was evaluated on
    metric: str  # for example perplexity, acc
    direction: str  # "lower" | "higher": which way is better
    status: str  # one of ACCURACY_STATUSES
    detail: str  # why, where the status is not ok; empty otherwise
    value: float | None  # None: the status says why
    standard_error: float | None  # None: the task gives none
    n_items: int  # tokens or questions
    values: tuple[float, ...]  # of each segment or question in order; empty: there are none
    seed: int
    parameters: dict[str, Any]  # of quantization and evaluation
    created_at: str
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    through: str = "reference"  # one of THROUGH; the model as it is has the reference
    content_hash: str | None = None  # of the checkpoint evaluated; None: fp16, or not known
    scheme_version: int | None = None  # None: fp16, or not kept
    bos: str | None = None  # where BOS went: segment, text, none; None: of no text, or not kept
    schema_version: int = SCHEMA_VERSION
