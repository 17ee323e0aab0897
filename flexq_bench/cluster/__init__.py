"""Measuring on a Ray cluster: one actor per GPU, or per CPU slot where there is no GPU."""

from __future__ import annotations

from flexq_bench.cluster.executor import RayExecutor

__all__ = ["RayExecutor"]
