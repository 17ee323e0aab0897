// k_split.cuh: K_SPLIT neighbouring blocks, a thread block cluster, that own the same outputs and share
// out K. With K_SPLIT 1 a block is alone. The including source defines K_SPLIT first.
#pragma once
#include "ptx.cuh"

#if K_SPLIT > 1 && __CUDA_ARCH__ < 900
#error "thread block clusters need compute capability 9.0"
#endif

// The blocks that share outputs, or the one block, wait for each other.
__device__ inline void meet() {
#if K_SPLIT > 1
  cluster_sync();
#else
  __syncthreads();
#endif
}

// What block `rank` has where this one has `mine`, in shared memory.
__device__ inline float4 share_of(const float4* mine, [[maybe_unused]] int rank) {
#if K_SPLIT > 1
  return load_cluster(shared_address(mine), rank);
#else
  return *mine;
#endif
}
