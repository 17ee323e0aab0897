"""The tables, one class each."""

from __future__ import annotations

from db.tables.base import Base
from db.tables.measurements import Measurement, Sample
from db.tables.provenance import Commit, Device, Environment
from db.tables.results import AccuracyResult, DecodeResult, ReferenceValue
from db.tables.runs import Job, PlannedCase, Run
from db.tables.series import Epoch, Series
from db.tables.verdicts import Alert, ChangePoint, Decision

__all__ = [
    "AccuracyResult",
    "Alert",
    "Base",
    "ChangePoint",
    "Commit",
    "Decision",
    "DecodeResult",
    "Device",
    "Environment",
    "Epoch",
    "Job",
    "Measurement",
    "PlannedCase",
    "ReferenceValue",
    "Run",
    "Sample",
    "Series",
]
