"""Errors of accuracy evaluation; each message is one line.

UsageError
└── AccuracyError        a model, a text or a task can't be evaluated as requested
    ├── MissingTaskError   a task can't be evaluated here: its data or lm-eval are missing
    └── DamagedModelError  a model is there, but damaged, incomplete or inconsistent
"""

from __future__ import annotations

from flexq_bench.errors import UsageError


class AccuracyError(UsageError):
    """A model, a text or a task can't be evaluated as requested."""


class DamagedModelError(AccuracyError):
    """A model is there, but damaged, incomplete or inconsistent. spec: its name, as requested."""

    def __init__(self, message: str, spec: str) -> None:
        super().__init__(message)
        self.spec = spec


class MissingTaskError(AccuracyError):
    """A task can't be evaluated here; a gate reports it as missing."""
