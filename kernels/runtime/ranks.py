"""Ranks: processes of one host that compute together, one per device, through torch.distributed.

NCCL on GPUs, gloo on CPUs. They meet in a file and talk over the loopback interface only. NVLink
multicast (NVLS) stays off: containers often lack the permission for it.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

_TIMEOUT = timedelta(minutes=10)  # of a collective whose other ranks do not come
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_CUDA_EVENT_CACHE": "0",  # its events outlive captured graphs
}


class Ranks:
    """A process alone: its sums are its own tensors. Subclasses have others."""

    rank = 0
    count = 1

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Add the tensors of all ranks in place, in their type; every rank gets the same sum."""
        return x

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Replace each value by the largest of all ranks, in place."""
        return x

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the columns [m, n] of all ranks to [m, count · n], by rank."""
        return x

    def any(self, condition: bool) -> bool:
        """Return True on every rank if the condition holds on one of them; waits for the device."""
        return condition


ALONE = Ranks()


class ProcessRanks(Ranks):
    """This process and those with the other ranks. Joining waits for all of them.

    meeting: a file that does not exist, the same for all ranks. Collectives go to the current
    stream and can be captured in CUDA graphs, after each was called once.
    """

    def __init__(self, device: torch.device, rank: int, count: int, meeting: Path) -> None:
        self.rank, self.count, self._device = rank, count, device
        os.environ.update(_ENVIRONMENT)
        on_gpu = device.type == "cuda"
        if not on_gpu:
            torch.set_num_threads(max(1, torch.get_num_threads() // count))
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=distributed.FileStore(str(meeting), count),  # type: ignore[attr-defined]
            rank=rank,
            world_size=count,
            timeout=_TIMEOUT,
            device_id=device if on_gpu else None,
        )

    def add(self, x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x)
        return x

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x, distributed.ReduceOp.MAX)
        return x

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        whole = x.new_zeros(rows, self.count, columns)
        whole[:, self.rank] = x
        return self.add(whole).view(rows, -1)  # sums with zeros are exact

    def any(self, condition: bool) -> bool:
        flag = torch.tensor([float(condition)], device=self._device)
        return bool(self.add(flag).item())

    def exchange(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send to the next rank while receiving from the previous one."""
        following, previous = (self.rank + 1) % self.count, (self.rank - 1) % self.count
        operations = [
            distributed.P2POp(distributed.isend, sent, following),
            distributed.P2POp(distributed.irecv, received, previous),
        ]
        for request in distributed.batch_isend_irecv(operations):
            request.wait()
