// common/k_split.cuh: split-K over the K_SPLIT blocks of a thread block cluster, which compute the same output
// tile. With K_SPLIT 1 there is no cluster. The including source defines K_SPLIT first.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"

#if K_SPLIT > 1 && __CUDA_ARCH__ < 900
#error "thread block clusters need compute capability 9.0"
#endif

// Barrier of the blocks that share an output tile; with K_SPLIT 1, of one block.
__device__ inline void sync_k_split() {
#if K_SPLIT > 1
  cluster_sync();
#else
  __syncthreads();
#endif
}

// Partial sums of block `rank`, at the shared memory address that is `local` in this block.
__device__ inline float4 partial_sums_of(const float4* local, [[maybe_unused]] int rank) {
#if K_SPLIT > 1
  return load_cluster(shared_address(local), rank);
#else
  return *local;
#endif
}
