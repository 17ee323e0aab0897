"""The gate record: how one scheme of a model stood against an accuracy policy, self-contained.

In files of results it stands among the others, told apart by its `kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from db.records import SCHEMA_VERSION, CommitInfo, DeviceInfo, RunInfo

GATE_OUTCOMES = ("missing", "regression", "ambiguous", "pass")  # the worst first


@dataclass(frozen=True, slots=True)
class GateLimit:
    """One limit of the policy. change, low, high: in `unit`."""

    check: str  # for example "perplexity of wikitext", "parity of kernels"
    limit: str  # in words
    outcome: str  # one of GATE_OUTCOMES
    reason: str  # empty: there is nothing to add
    base: float | None  # None: not evaluated, the reason says why
    value: float | None  # None: as base
    change: float | None  # None: as base, or the check has none
    low: float | None  # of the 95 % interval; None: there is none
    high: float | None  # as low
    unit: str
    detectable: float | None = None  # the least loss that the data show; None: not such a limit


@dataclass(frozen=True, slots=True)
class GateRecord:
    """One scheme of a model, judged once."""

    uuid: str  # uuid5 of run uuid, policy, base, scheme and when: the same record everywhere
    model: str
    model_hash: str  # of the files that were loaded
    scheme: str
    base: str  # the scheme that it was compared with
    policy: str  # its name
    policy_version: int  # of the form of its file
    policy_hash: str  # of what its file says
    verdict: str  # one of GATE_OUTCOMES: the worst of its limits
    exit_code: int  # that this verdict ends the gate with
    limits: tuple[GateLimit, ...]
    created_at: str
    run: RunInfo  # in which the model was evaluated
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    through: str = "reference"  # as db.accuracy_records.AccuracyRecord
    content_hash: str | None = None  # of the checkpoint that was judged; None: not known
    reference: str | None = None  # the model that all was compared with; None: the model itself
    reference_hash: str | None = None  # of its files, or of the stored reference
    diagnosis: dict[str, Any] | None = None  # where it lost; None: it did not, or is not known
    schema_version: int = SCHEMA_VERSION
