"""Exceptions of the workloads package."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A workload, suite or model that can't be: the message says why and what to do."""
