"""Gate record: verdict on one quantization scheme of a model under an accuracy policy.

Self-contained like Record. In a results file its `kind` distinguishes it from other records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexq_bench.db.records import SCHEMA_VERSION, CommitInfo, DeviceInfo, RunInfo

GATE_OUTCOMES = ("missing", "regression", "ambiguous", "pass")  # worst first


@dataclass(frozen=True, slots=True)
class GateLimit:
    """One limit of the policy. change, low, high: in `unit`."""

    check: str  # for example "perplexity of wikitext", "parity of kernels"
    limit: str  # in words
    outcome: str  # one of GATE_OUTCOMES
    reason: str  # explanation; may be empty
    base: float | None  # None: not evaluated, see reason
    value: float | None  # None: not evaluated, see reason
    change: float | None  # None: not evaluated, or not defined for this check
    low: float | None  # bounds of the 95 % interval; None: no interval
    high: float | None
    unit: str
    detectable: float | None = None  # smallest detectable loss; None: not defined for this limit


@dataclass(frozen=True, slots=True)
class GateRecord:
    """One verdict on one scheme of a model."""

    uuid: str  # uuid5 of run uuid, policy, base, scheme and time: equal in every database
    model: str
    model_hash: str  # of the loaded files
    scheme: str
    base: str  # scheme it is compared with
    policy: str  # name
    policy_version: int  # of the policy's file format
    policy_hash: str  # of the policy's content
    verdict: str  # one of GATE_OUTCOMES: the worst of its limits
    exit_code: int  # of the gate command
    limits: tuple[GateLimit, ...]
    created_at: str
    run: RunInfo  # in which the model was evaluated
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    through: str = "reference"  # see db.accuracy_records.AccuracyRecord
    content_hash: str | None = None  # of the judged checkpoint; None: unknown
    reference: str | None = None  # reference model; None: the unquantized model itself
    reference_hash: str | None = None  # of its files, or of the stored predictions
    diagnosis: dict[str, Any] | None = None  # layers that lose accuracy; None: no loss, or unknown
    schema_version: int = SCHEMA_VERSION
