// cluster.cuh: how blocks of a thread block cluster hand each other results without a barrier of all their
// memory accesses, which the release of barrier.cluster is (MEMBAR.ALL.GPU): asynchronous stores, whose bytes
// the receiver's mbarrier counts (PTX ISA, st.async).
#pragma once
#include "mbarrier.cuh"

#if __CUDA_ARCH__ >= 900
// An mbarrier of one phase. One thread begins, and says by arrive_expecting how many bytes are to come, be it
// before they do or later; other blocks may send once all have met.
__device__ inline void begin_to_count(uint32_t mbarrier) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(mbarrier)
      : "memory");
}

// All threads, each warp together.
__device__ inline void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where block `rank` has what this one has at `shared`.
__device__ inline uint32_t address_in(uint32_t shared, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// 16 bytes to another block's shared memory, and word of them to its mbarrier.
__device__ inline void send(uint32_t to, const float4& v, uint32_t mbarrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(mbarrier)
      : "memory");
}

// What begin_to_count began.
__device__ inline void wait_for_bytes(uint32_t mbarrier) { wait_for_phase(mbarrier, 0); }
#endif
