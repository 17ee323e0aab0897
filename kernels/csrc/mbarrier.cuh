// mbarrier.cuh: Hopper's mbarriers, 8 bytes in shared memory each, that count arrivals and bytes (PTX ISA, mbarrier).
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
__device__ inline void init_barrier(uint32_t mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}

// Behind init_barrier, before any other thread or block uses them.
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
#endif
