"""SQLAlchemy models of all tables."""

from __future__ import annotations

from db.tables.base import Base
from db.tables.fleet import DeviceOffset, Job, Night, Request, TuningChoice, Worker
from db.tables.gates import AccuracyGate
from db.tables.measurements import Measurement, Sample
from db.tables.noise import FalseAlarmRate, Noise
from db.tables.notifications import Delivery, Event
from db.tables.provenance import Commit, Device, Environment
from db.tables.releases import Release
from db.tables.results import (
    AccuracyResult,
    AccuracySample,
    DecodeResult,
    DecodeSample,
    ReferenceValue,
    ServingResult,
)
from db.tables.runs import PlannedCase, Run
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
    "AccuracyGate",
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
    "DecodeSample",
    "Delivery",
    "Device",
    "DeviceOffset",
    "Environment",
    "Epoch",
    "EpochBreak",
    "Event",
    "FalseAlarmRate",
    "Job",
    "Measurement",
    "Night",
    "Noise",
    "PlannedCase",
    "ReferenceValue",
    "Release",
    "Request",
    "Run",
    "Sample",
    "Series",
    "ServingResult",
    "TuningChoice",
    "Worker",
]
