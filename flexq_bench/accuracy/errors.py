"""Errors of accuracy evaluation; each message is one line.

UsageError
└── AccuracyError        a model, a text or a task can't be evaluated as requested
    └── MissingTaskError   a task can't be evaluated here: its data or lm-eval are missing
"""

from __future__ import annotations

from flexq_bench.errors import UsageError


class AccuracyError(UsageError):
    """A model, a text or a task can't be evaluated as requested."""


class MissingTaskError(AccuracyError):
    """A task can't be evaluated here; a gate reports it as missing."""
