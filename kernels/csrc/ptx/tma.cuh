// tma.cuh: loads of tensor boxes by the Tensor Memory Accelerator (TMA). They complete on an mbarrier of the
// destination (PTX ISA, cp.async.bulk.tensor).
#pragma once
#include "ptx/mbarrier.cuh"

#if __CUDA_ARCH__ >= 900
// A tensor map of cuTensorMapEncodeTiled, passed as a __grid_constant__ argument.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// Tensor maps have a separate cache: prefetch a map before its first use.
__device__ inline void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Load the box of a two-dimensional tensor map that begins at (column, row).
__device__ inline void tma_load_2d(uint32_t shared, const TensorMap& map, int column, int row, uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(mbarrier)
      : "memory");
}

// Load contiguous bytes, a multiple of 16, with an L2 policy (cp.async.bulk).
__device__ inline void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t mbarrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(mbarrier), "l"(policy)
      : "memory");
}

// tma_load_2d, multicast to the blocks of the cluster whose bits are set; the mbarrier of each counts its bytes.
__device__ inline void tma_load_2d_multicast(uint32_t shared, const TensorMap& map, int column, int row,
                                       uint32_t mbarrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(mbarrier), "h"(blocks)
      : "memory");
}
#endif
