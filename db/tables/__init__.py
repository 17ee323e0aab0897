"""The tables, one class each."""

from __future__ import annotations

from db.tables.base import Base
from db.tables.measurements import Measurement, Sample
from db.tables.noise import FalseAlarmRate, Noise
from db.tables.provenance import Commit, Device, Environment
from db.tables.results import AccuracyResult, AccuracySample, DecodeResult, ReferenceValue
from db.tables.runs import Job, PlannedCase, Run
from db.tables.series import Epoch, Series
from db.tables.verdicts import (
    Alert,
    AlertEvent,
    ChangePoint,
    Decision,
    DecisionEvidence,
    EpochBreak,
)

__all__ = [
    "AccuracyResult",
    "AccuracySample",
    "Alert",
    "AlertEvent",
    "Base",
    "ChangePoint",
    "Commit",
    "Decision",
    "DecisionEvidence",
    "DecodeResult",
    "Device",
    "Environment",
    "Epoch",
    "EpochBreak",
    "FalseAlarmRate",
    "Job",
    "Measurement",
    "Noise",
    "PlannedCase",
    "ReferenceValue",
    "Run",
    "Sample",
    "Series",
]
