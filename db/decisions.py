"""Plain values of stored decisions, alert states and the A/A calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flexq_bench.db.records import CommitInfo, DeviceInfo

OPEN_STATES = (
    "new",  # not yet reviewed
    "acknowledged",  # under investigation
)
CLOSED_STATES = (
    "explained",  # intended or accepted: the series start a new epoch
    "fixed",  # the level has returned
    "false-alarm",  # no real change
)
ALERT_STATES = OPEN_STATES + CLOSED_STATES
STATES_WITH_A_REASON = ("explained", "false-alarm")  # a note must give the reason


@dataclass(frozen=True, slots=True)
class DecisionInfo:
    """Verdict on one series between two commits, with its exact inputs.

    series: the identity of the series, all columns that db.writer.series_identity returns. watched:
    True on the watched branch; only such decisions open and close alerts. evidence: JSON values
    without NaN and infinities; its fingerprint is the input hash. log_ratio: ln(head / base); low,
    high: one-sided 99 % bounds; None: nothing was judged.
    """

    uuid: str
    series: Mapping[str, Any]
    base: CommitInfo
    head: CommitInfo
    device: DeviceInfo
    watched: bool
    detector: str
    detector_version: int
    parameters: Mapping[str, Any]
    evidence: Mapping[str, Any]
    verdict: str
    cause: str
    reason: str
    log_ratio: float | None
    log_ratio_low: float | None
    log_ratio_high: float | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class NoiseInfo:
    """Noise of a series. Sigmas are of ln(head / base); None: too little data."""

    series_id: int
    computed_at: datetime
    decisions: tuple[str, ...]  # uuids of the comparisons it was estimated from
    placements: int
    blocks: int
    block_sigma: float | None
    placement_sigma: float | None
    comparison_sigma: float | None
    estimate_sigma: float
    noise_floor: float | None
    smallest_step: float | None


@dataclass(frozen=True, slots=True)
class FalseAlarmInfo:
    """Rate at which canaries (a commit compared with itself) were judged slower or faster."""

    since: datetime
    until: datetime
    decisions: tuple[str, ...]  # uuids of the canaries
    alarms: int
    rate: float  # alarms per canary
    low: float  # bounds of the interval at `confidence`
    high: float
    confidence: float
