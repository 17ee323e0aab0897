"""Measuring on a Ray cluster: one actor per GPU, or per CPU slot where there is no GPU."""

from __future__ import annotations

from flexq_bench.cluster.coordinator import Work
from flexq_bench.cluster.fleet import Fleet, Kind, open_fleet
from flexq_bench.cluster.ray_crew import RayCrew
from flexq_bench.cluster.times import Times, parse_times

__all__ = ["Fleet", "Kind", "RayCrew", "Times", "Work", "open_fleet", "parse_times"]
