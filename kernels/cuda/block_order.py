"""Control of the order in which the hardware assigns blocks to SMs.

The block scheduler keeps state between kernels. A kernel of one wave does not change this state; a
kernel of several waves does, by the order in which its blocks end. If the blocks of a one-wave
kernel don't divide evenly over the SMs, its speed depends on the state: it differs by up to 12 % on
an H200, and stays the same until a kernel of several waves runs. Setting the state makes the speed
repeatable (benchmarks/verdicts/block_order.py); drawing a new one before each sample makes samples
independent, so that their mean is the kernel's speed.
"""

from __future__ import annotations

import random

import torch

from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Build

BUILD = Build.of("probes/block_order.cu")
_WAVES, _LONGEST_NS = 3, 4000  # of blocks on an SM, one after the other


class BlockOrders:
    """Block orders of the current GPU, which is `device`; setting one takes about 60 us.

    count: number of different orders, equal in every process. Raises UnsupportedError without CuPy,
    KernelError if the launch fails.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        gpu = current_gpu()
        self.count = count
        self._sms, self._shared_bytes = gpu.sms, gpu.block_shared_bytes
        ranks = [_permutation(gpu.sms, index) for index in range(count)]
        self._ranks = torch.tensor(ranks, dtype=torch.int32, device=device)
        self._state = torch.zeros(1 + gpu.sms, dtype=torch.int64, device=device)
        self._function = load_function(BUILD, "order_blocks")

    def set(self, index: int) -> None:
        """Set order `index`, below count, in the current stream."""
        self._state.zero_()
        self._function.launch(
            (2 * self._sms, 1, 1),
            32,
            (self._state, self._ranks[index], self._sms),
            shared_bytes=self._shared_bytes,
        )


class BlockShuffle:
    """Random block orders of the current GPU; setting one takes about 10 us.

    Raises UnsupportedError without CuPy, KernelError if the launch fails.
    """

    def __init__(self) -> None:
        gpu = current_gpu()
        self._grid, self._shared_bytes = _WAVES * gpu.sms, gpu.block_shared_bytes
        self._function = load_function(BUILD, "shuffle_blocks")

    def run(self) -> None:
        """Set a random order in the current stream."""
        self._function.launch(
            (self._grid, 1, 1),
            32,
            (random.getrandbits(31), _LONGEST_NS),
            shared_bytes=self._shared_bytes,
        )


def _permutation(sms: int, seed: int) -> list[int]:
    ranks = list(range(sms))
    random.Random(seed).shuffle(ranks)
    return ranks
