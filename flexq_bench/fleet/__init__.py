"""Measuring on a Ray cluster: one actor per GPU, or per CPU slot where there is no GPU."""

from __future__ import annotations

from flexq_bench.fleet.coordinator import Work
from flexq_bench.fleet.fleet import Fleet, Kind, open_fleet
from flexq_bench.fleet.ray_pool import RayCrew
from flexq_bench.fleet.timeouts import Times, parse_times

__all__ = ["Fleet", "Kind", "RayCrew", "Times", "Work", "open_fleet", "parse_times"]
