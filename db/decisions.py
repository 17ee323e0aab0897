"""Decisions, alerts and the A/A calibration as plain values: what is stored of a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from db.records import CommitInfo, DeviceInfo

OPEN_STATES = (
    "new",  # nobody has looked at it
    "acknowledged",  # somebody is on it
)
CLOSED_STATES = (
    "explained",  # wanted, or accepted: the series start a new epoch
    "fixed",  # the level is back
    "false-alarm",  # there was nothing
)
ALERT_STATES = OPEN_STATES + CLOSED_STATES
STATES_WITH_A_REASON = ("explained", "false-alarm")  # nobody is asked again: a note says why


@dataclass(frozen=True, slots=True)
class DecisionInfo:
    """A verdict on one series between two commits, with its exact inputs.

    series: the identity of the series, every column (db.writer.series_identity has their names).
    watched: of the line that people watch; only such decisions open and close alerts.
    evidence: JSON values; NaN and infinities have no place in it. Its fingerprint is the input
    hash. log_ratio: ln(head / base); low, high: one-sided 99 % bounds; None: nothing was judged.
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
    """The noise of a series. Sigmas of ln(head / base); None: too little to say."""

    series_id: int
    computed_at: datetime
    decisions: tuple[str, ...]  # uuids of the comparisons that it rests on
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
    rate: float  # alarms a canary
    low: float  # of the interval at `confidence`
    high: float
    confidence: float
