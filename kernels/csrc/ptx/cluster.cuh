// cluster.cuh: barriers of a thread block cluster and accesses to distributed shared memory.
// Blocks send results by asynchronous stores that complete on the receiver's mbarrier (PTX ISA, st.async),
// because the release of barrier.cluster would order all memory accesses of a block (MEMBAR.ALL.GPU).
#pragma once
#include "ptx/mbarrier.cuh"

#if __CUDA_ARCH__ >= 900
// Barrier of all threads of a cluster, with release and acquire of shared memory.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Load 16 bytes of block `rank`'s shared memory, at the address that is `shared` in this block.
__device__ inline float4 load_cluster(uint32_t shared, uint32_t rank) {
  uint32_t address;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Initialize an mbarrier that is used for one phase. The same thread sets the expected bytes by
// mbarrier_arrive_expect_tx, before or after they arrive. Other blocks may store after cluster_wait.
__device__ inline void mbarrier_init_for_cluster(uint32_t mbarrier) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(mbarrier)
      : "memory");
}

// Executed by all threads of the cluster, with converged warps.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Address in block `rank` that corresponds to `shared` in this block.
__device__ inline uint32_t map_shared_rank(uint32_t shared, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Asynchronous store of 16 bytes to another block's shared memory; `mbarrier` of that block counts them.
__device__ inline void store_async(uint32_t to, const float4& v, uint32_t mbarrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(mbarrier)
      : "memory");
}

// Wait for the only phase of an mbarrier of mbarrier_init_for_cluster.
__device__ inline void mbarrier_wait_first_phase(uint32_t mbarrier) { mbarrier_wait(mbarrier, 0); }
#endif
