// bulk_copy.cuh: copies of whole blocks of memory by Hopper's copy engine, whose bytes an mbarrier of the
// receiver counts (PTX ISA, cp.async.bulk), and those mbarriers, of many phases.
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
// A tensor map as the driver encodes it (cuTensorMapEncodeTiled), a kernel's __grid_constant__ argument.
struct alignas(64) TensorMap {
  uint64_t of[16];
};

__device__ inline void init_barrier(uint32_t mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}

// Behind the first, before any other thread or block uses them.
__device__ inline void barriers_are_initialized() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One of the arrivals; the phase ends when as many bytes have come as well.
__device__ inline void arrive_expecting(uint32_t mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}

__device__ inline void arrive(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

// At the mbarrier of block `rank` of the cluster that is there where this one's is.
__device__ inline void arrive_at(uint32_t mbarrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(mbarrier),
      "r"(rank)
      : "memory");
}

// Until the phase of this parity has ended.
__device__ inline void wait_for_phase(uint32_t mbarrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAITING_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAITING_%=;\n}" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
}

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
