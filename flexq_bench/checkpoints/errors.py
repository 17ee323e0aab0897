"""Errors of quantized checkpoints."""

from __future__ import annotations

from flexq_bench.errors import UsageError


class CheckpointError(UsageError):
    """A checkpoint that is damaged, of another version or inconsistent; the message is one line."""
