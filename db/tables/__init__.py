"""SQLAlchemy models of all tables."""

from __future__ import annotations

from flexq_bench.db.tables.base import Base
from flexq_bench.db.tables.fleet import DeviceOffset, Job, Night, Request, TuningChoice, Worker
from flexq_bench.db.tables.gates import AccuracyGate
from flexq_bench.db.tables.measurements import Measurement, Sample
from flexq_bench.db.tables.noise import FalseAlarmRate, Noise
from flexq_bench.db.tables.notifications import Delivery, Event
from flexq_bench.db.tables.provenance import Commit, Device, Environment
from flexq_bench.db.tables.releases import Release
from flexq_bench.db.tables.results import (
    AccuracyResult,
    AccuracySample,
    DecodeResult,
    DecodeSample,
    ReferenceValue,
    ServingResult,
)
from flexq_bench.db.tables.runs import PlannedCase, Run
from flexq_bench.db.tables.series import Epoch, Series
from flexq_bench.db.tables.verdicts import (
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
