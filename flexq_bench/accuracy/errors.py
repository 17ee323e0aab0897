"""Errors of measuring accuracy; each message is one line.

UsageError
└── AccuracyError        a model, a text or a task that can't be evaluated as asked
    └── MissingTaskError   a task that exists, and can't be evaluated here: for want of its data,
                           or of lm-eval
"""

from __future__ import annotations

from flexq_bench.errors import UsageError


class AccuracyError(UsageError):
    """A model, a text or a task that can't be evaluated as asked."""


class MissingTaskError(AccuracyError):
    """A task that exists, and can't be evaluated here: a gate says that it is missing."""
