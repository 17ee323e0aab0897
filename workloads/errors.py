"""Exceptions of the workloads package."""

from __future__ import annotations


class WorkloadError(ValueError):
    """Invalid workload, suite or model: the message gives the reason and what to do."""
