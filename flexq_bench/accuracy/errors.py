"""What measuring accuracy raises; each message is one line.

UsageError
└── AccuracyError    a model, a text or a task that can't be evaluated as asked
"""

from __future__ import annotations

from flexq_bench.errors import UsageError


class AccuracyError(UsageError):
    """A model, a text or a task that can't be evaluated as asked."""
