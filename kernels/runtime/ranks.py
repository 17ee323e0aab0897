"""Ranks: processes of one host that compute together, one per device, through torch.distributed.

NCCL on GPUs, gloo on CPUs. They meet in a file and talk over the loopback interface only. NVLink
multicast (NVLS) stays off: containers often lack the permission for it. Short FP16 vectors of GPUs
that can write each other's memory go through csrc/ranks/exchange.cu: one launch, no library.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build

_EXCHANGE, _THREADS = "rank_exchange", 256  # csrc/ranks/exchange.cu
SUM_KERNELS = (_EXCHANGE, "nccl")  # beginnings of their names
_MOST_PAIRS = 1 << 16  # of an exchange: longer vectors are left to the library
MAX_EXCHANGE_RANKS = 8
_TIMEOUT = timedelta(minutes=10)  # of a collective whose other ranks do not come
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
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

    def add_by_library(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `add` by the library of collectives, whatever the size."""
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


class _Inboxes:
    """Memory of each GPU that the others write (torch's symmetric memory)."""

    def __init__(self, device: torch.device, rank: int, count: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._rank, self._count = rank, count
        self._memory = symmetric_memory
        self._everyone = distributed.distributed_c10d._get_default_group()
        self._inbox = symmetric_memory.empty(
            2 * count * _MOST_PAIRS, dtype=torch.int64, device=device
        ).zero_()
        shared = symmetric_memory.rendezvous(self._inbox, self._everyone)
        self._addresses = torch.tensor(shared.buffer_ptrs, device=device)
        self._counts = torch.zeros(_MOST_PAIRS // _THREADS, dtype=torch.int32, device=device)
        self._functions = [
            load_function(exchange_build(count, largest=largest), _EXCHANGE)
            for largest in (False, True)
        ]

    @classmethod
    def opened(cls, device: torch.device, rank: int, count: int) -> _Inboxes | None:
        """Open the inboxes of all ranks; None if the GPUs can't reach each other's memory."""
        others = (other for other in range(torch.cuda.device_count()) if other != device.index)
        reach = all(torch.cuda.can_device_access_peer(device, other) for other in others)
        agreed = torch.tensor(
            reach and count <= MAX_EXCHANGE_RANKS, dtype=torch.int32, device=device
        )
        distributed.all_reduce(agreed, distributed.ReduceOp.MIN)
        if not agreed.item():
            return None
        inboxes = cls(device, rank, count)
        distributed.barrier()  # all are empty before the first is written
        return inboxes

    def memory_of(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Allocate memory like this on all ranks, and return that of one of them."""
        own = self._memory.empty(like.numel(), dtype=like.dtype, device=like.device)
        shared = self._memory.rendezvous(own, self._everyone)
        self._shared = own, shared  # kept as long as the others may write
        return shared.get_buffer(rank, (like.numel(),), like.dtype)

    def take(self, x: torch.Tensor) -> bool:
        """Return True for the vectors that `exchanged` takes."""
        pairs, odd = divmod(x.numel(), 2)
        in_pairs = x.is_contiguous() and not odd and x.data_ptr() % 4 == 0
        return x.dtype == torch.float16 and in_pairs and pairs <= _MOST_PAIRS

    def exchanged(self, x: torch.Tensor, *, largest: bool) -> torch.Tensor:
        """Replace x by the sum, or by the largest values, of all ranks."""
        pairs = x.numel() // 2
        arguments = (x, self._addresses, self._counts, pairs, self._rank, _MOST_PAIRS)
        grid = (-(-pairs // _THREADS), 1, 1)
        self._functions[largest].launch(grid, _THREADS, arguments, overlap_previous=True)
        return x


def exchange_build(count: int, *, largest: bool) -> Build:
    """Return the build of csrc/ranks/exchange.cu for so many ranks."""
    block = Block(_EXCHANGE, _THREADS)
    return Build.of("ranks/exchange.cu", block=block, RANKS=count, LARGEST=int(largest))


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

        self._inboxes = _Inboxes.opened(device, rank, count) if on_gpu else None
        self._received: torch.Tensor | None = None  # by `exchange`

    def add(self, x: torch.Tensor) -> torch.Tensor:
        if self._inboxes is not None and self._inboxes.take(x):
            return self._inboxes.exchanged(x, largest=False)
        return self.add_by_library(x)

    def add_by_library(self, x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x)
        return x

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        if self._inboxes is not None and self._inboxes.take(x):
            return self._inboxes.exchanged(x, largest=True)
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

    def exchange(self, sent: torch.Tensor) -> None:
        """Write to memory of the next rank while the previous one writes to this rank's.

        The first call for a size allocates that memory.
        """
        following, previous = (self.rank + 1) % self.count, (self.rank - 1) % self.count
        received = self._received
        if received is None or received.numel() != sent.numel():
            if self._inboxes is not None:
                received = self._inboxes.memory_of(following, sent)
            else:
                received = torch.empty_like(sent)
            self._received = received
        if self._inboxes is not None:
            received.copy_(sent)
            return
        operations = [
            distributed.P2POp(distributed.isend, sent, following),
            distributed.P2POp(distributed.irecv, received, previous),
        ]
        for request in distributed.batch_isend_irecv(operations):
            request.wait()
