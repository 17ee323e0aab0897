"""Pools of devices: this process, or a Ray cluster with one actor per GPU or CPU slot.

`open_pool` selects one. On a cluster a coordinator leases jobs to workers, stores each result when
it arrives, and replaces lost workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexq_bench.packages import exported_on_use

if TYPE_CHECKING:
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

# They import torch, which `status` doesn't need.
__getattr__ = exported_on_use(
    __name__,
    {
        **dict.fromkeys(("Kind", "Pool", "Work"), "pool"),
        **dict.fromkeys(("NO_CLUSTER", "PoolOptions", "device_name", "open_pool"), "pool_choice"),
        "RayPool": "ray_pool",
        "RayWorkers": "ray_workers",
        **dict.fromkeys(("Times", "parse_times"), "timeouts"),
    },
)
