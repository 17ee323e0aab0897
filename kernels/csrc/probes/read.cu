// probes/read.cu: probes of DRAM bandwidth and launch latency.
//   read_words   reads uint4 [chunks] once and nothing else: the floor of a weight-bound kernel
//   empty        a launch that does nothing
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

#if !defined(UNROLL) || !defined(OVERLAP)
#error "define UNROLL, 16-byte loads in flight per thread, and OVERLAP, 1: start before the previous kernel ends"
#endif

// sums[block] = sum of the block's words, modulo 2^32, so that the compiler cannot remove loads.
extern "C" __global__ void __launch_bounds__(1024)
read_words(const uint4* words, uint32_t* sums, int chunks) {
  const uint64_t policy = evict_first_policy();
  if constexpr (OVERLAP) let_next_kernel_start();
  const int stride = gridDim.x * blockDim.x;
  uint32_t sum = 0;
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + (UNROLL - 1) * stride < chunks; at += UNROLL * stride) {
    uint4 v[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) v[i] = load_once(words + at + i * stride, policy);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) sum += v[i].x + v[i].y + v[i].z + v[i].w;
  }
  for (; at < chunks; at += stride) {
    const uint4 v = load_once(words + at, policy);
    sum += v.x + v.y + v.z + v.w;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if constexpr (OVERLAP) wait_for_previous_kernel();
  __shared__ uint32_t partial[32];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += partial[warp];
    sums[blockIdx.x] = total;
  }
}

extern "C" __global__ void empty() {}
