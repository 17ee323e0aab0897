// bulk_copy.cuh: copies of whole blocks of memory by Hopper's copy engine, whose bytes an mbarrier of the
// receiver counts (PTX ISA, cp.async.bulk).
#pragma once
#include "mbarrier.cuh"

#if __CUDA_ARCH__ >= 900
// A tensor map as the driver encodes it (cuTensorMapEncodeTiled), a kernel's __grid_constant__ argument.
struct alignas(64) TensorMap {
  uint64_t of[16];
};

// Before the first use: a map is read through a cache of its own.
__device__ inline void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box of a two-dimensional tensor map that begins at (column, row).
__device__ inline void copy_box(uint32_t shared, const TensorMap& map, int column, int row, uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(mbarrier)
      : "memory");
}

// The same to the same place of every block of the cluster whose bit is set, each with its own mbarrier.
__device__ inline void copy_box_to_all(uint32_t shared, const TensorMap& map, int column, int row,
                                       uint32_t mbarrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(mbarrier), "h"(blocks)
      : "memory");
}
#endif
