"""Errors of engines; the message is one line."""

from __future__ import annotations

from flexq_bench.errors import InfrastructureError


class EngineError(InfrastructureError):
    """An engine that does not start, dies, or does not answer. The message names the engine."""
