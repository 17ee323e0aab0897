"""The slots for workers: the GPUs of a Ray cluster's nodes, or their CPU slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flexq_bench.fleet.ray_session import MAX_CPU_SLOTS, cpu_slots
from flexq_bench.kernels.contract import Backend

_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one worker on a node. number: index of the slot; Ray assigns the GPU.

    accelerator: Ray's name of the node's GPUs, such as H200 or GeForce-RTX-3090-Ti; empty: none.
    """

    node: str  # Ray's id
    host: str
    number: int
    backend: Backend
    accelerator: str = ""

    def create(self, actor: type, *arguments: object) -> Any:
        """Create actor(backend, *arguments) on this slot; only one at a time gets its device."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {
            "num_gpus": 1 if self.backend == "cuda" else 0,
            "num_cpus": 0 if self.backend == "cuda" else 1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False),
        }
        if self.accelerator:
            options["accelerator_type"] = self.accelerator
        return ray.remote(actor).options(**options).remote(self.backend, *arguments)


def slots(backend: Backend, *, local: bool) -> tuple[Slot, ...]:
    """The slots of the nodes that are alive. local: the cluster was started on this machine."""
    import ray

    free: list[Slot] = []
    for node in ray.nodes():
        if node["Alive"]:
            free.extend(_of_node(node, backend, local))
    return tuple(free if backend == "cuda" else free[:MAX_CPU_SLOTS])


def is_alive(node: str) -> bool:
    """Return True if a node of the cluster is still alive."""
    import ray

    return any(row["NodeID"] == node and row["Alive"] for row in ray.nodes())


def _of_node(node: dict[str, Any], backend: Backend, local: bool) -> Iterator[Slot]:
    resources = node["Resources"]
    if backend == "cuda":
        count = int(resources.get("GPU", 0))
        names = [name for name in resources if name.startswith(_ACCELERATOR)]
        accelerator = names[0].removeprefix(_ACCELERATOR) if names and count else ""
    else:
        count, accelerator = (cpu_slots() if local else int(resources.get("CPU", 0))), ""
    for number in range(count):
        yield Slot(node["NodeID"], node["NodeManagerHostname"], number, backend, accelerator)
