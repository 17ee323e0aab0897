"""Pools of devices: this process, or a Ray cluster with one actor per GPU or CPU slot.

`open_pool` selects one. On a cluster a coordinator leases jobs to workers, stores each result when
it arrives, and replaces lost workers.
"""

from __future__ import annotations

from flexq_bench.fleet.pool import Kind, Pool, Work
from flexq_bench.fleet.pool_choice import NO_CLUSTER, PoolOptions, device_name, open_pool
from flexq_bench.fleet.ray_pool import RayPool
from flexq_bench.fleet.ray_workers import RayWorkers
from flexq_bench.fleet.timeouts import Times, parse_times

__all__ = [
    "NO_CLUSTER",
    "Kind",
    "Pool",
    "PoolOptions",
    "RayPool",
    "RayWorkers",
    "Times",
    "Work",
    "device_name",
    "open_pool",
    "parse_times",
]
