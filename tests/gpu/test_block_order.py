"""The block scheduler's state: kept by kernels of one wave, set or shuffled by ours."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.cuda.block_order import BlockOrders, BlockShuffle
from flexq_bench.kernels.runtime.gpu import current_gpu

pytestmark = pytest.mark.alone

SOURCE = r"""
extern "C" __global__ void where(int* sm) {
  unsigned number;
  asm volatile("mov.u32 %0, %smid;" : "=r"(number));
  sm[blockIdx.x] = number;
}
"""


def where_blocks_run() -> tuple[int, ...]:
    """SM of each block of a kernel of one wave that leaves some SMs without a block."""
    import cupy

    gpu = current_gpu()
    blocks = gpu.sms - 4
    function = cupy.RawModule(code=SOURCE, backend="nvrtc").get_function("where")
    function.max_dynamic_shared_size_bytes = gpu.block_shared_bytes
    found = torch.full((blocks,), -1, dtype=torch.int32, device="cuda")
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        function((blocks,), (32,), (found.data_ptr(),), shared_mem=gpu.block_shared_bytes)
    return tuple(found.tolist())


def test_a_shuffle_draws_a_new_order_each_time():
    shuffle = BlockShuffle()
    orders = set()
    for _ in range(8):
        shuffle.run()
        orders.add(where_blocks_run())

    assert len(orders) >= 3  # of eight; some were drawn twice on an H100


def test_set_block_order_is_the_same_after_any_shuffle():
    orders, shuffle = BlockOrders(2, torch.device("cuda")), BlockShuffle()
    found = set()
    for _ in range(4):
        shuffle.run()
        orders.set(0)
        found.add(where_blocks_run())

    assert len(found) == 1
