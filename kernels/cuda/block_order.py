"""The order in which SMs get blocks, set to known ones.

Which SM gets which block of a kernel depends on where the hardware's distribution of blocks stands.
Kernels of one wave of blocks leave it where it is. The order in which the blocks of a longer kernel
end moves it. So a kernel of one wave, whose blocks don't divide evenly over the SMs, has one of
several speeds, up to 12 % apart on an H200, for as long as no longer kernel runs. Setting the order
makes the speed repeatable, and several orders tell what it depends on
(benchmarks/verdicts/block_order.py).
"""

from __future__ import annotations

import random

import torch

from kernels.runtime.gpu import current_gpu
from kernels.runtime.module import load_function
from kernels.runtime.nvrtc import Build

BUILD = Build.of("probes/block_order.cu")


class BlockOrders:
    """Orders of the SMs of the current GPU, which is `device`, each set by a kernel of some 60 us.

    count: of different ones; the same for every process. Raises UnsupportedError without CuPy,
    KernelError if the launch is refused.
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
        """Queue order `index`, below count, in the current stream."""
        self._state.zero_()
        self._function.launch(
            (2 * self._sms, 1, 1),
            32,
            (self._state, self._ranks[index], self._sms),
            shared_bytes=self._shared_bytes,
        )


def _permutation(sms: int, seed: int) -> list[int]:
    ranks = list(range(sms))
    random.Random(seed).shuffle(ranks)
    return ranks
