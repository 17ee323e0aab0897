// mbarrier.cuh: mbarriers with transaction counts (PTX ISA, mbarrier); each has 8 bytes of shared memory.
#pragma once
#include "ptx/types.cuh"

#if __CUDA_ARCH__ >= 900
__device__ inline void mbarrier_init(uint32_t mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}

// After mbarrier_init, before another thread or block uses the mbarriers.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive and add to the expected transaction bytes of the phase.
__device__ inline void mbarrier_arrive_expect_tx(uint32_t mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}

__device__ inline void mbarrier_arrive(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

// Arrive at the mbarrier at the same address in block `rank` of the cluster.
__device__ inline void mbarrier_arrive_remote(uint32_t mbarrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(mbarrier),
      "r"(rank)
      : "memory");
}

// Wait until the phase of this parity has completed.
__device__ inline void mbarrier_wait(uint32_t mbarrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAITING_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAITING_%=;\n}" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
}
#endif
