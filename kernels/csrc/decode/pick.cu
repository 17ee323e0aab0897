// decode/pick.cu: greedy sampling (argmax); advances each sequence by one token.
//   logits     half [B, VOCABULARY]
//   tokens     int [B]: the first of a row's largest logits; NaN is larger than any number, as in torch
//   positions  int [B]: incremented, at most CAPACITY - 1
//   history    long long [>= B, CAPACITY]: the token, at the new position
// grid: (blocks of a cluster, B). Reads 16 bytes at a time where rows are multiples of 16 bytes.
#include "decode/math.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32, WIDTH = 8;  // WIDTH: logits per load

// Key in the order of logits; of equal logits the first has the largest key. Its lower word is the token, inverted.
__device__ inline uint64_t sort_key(half_bits logit, int token) {
  const uint32_t magnitude = logit & 0x7fffu;
  const uint32_t order = magnitude > 0x7c00u   ? 0xffffu             // NaN
                         : magnitude == 0u     ? 0x8000u             // zeros are equal
                         : logit & 0x8000u     ? 0x8000u - magnitude
                                               : 0x8000u + magnitude;
  return static_cast<uint64_t>(order) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}

__device__ inline uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ inline uint64_t warp_largest(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_pick(const half_bits* logits, int* tokens, int* positions, long long* history, int vocabulary,
            int capacity) {
  __shared__ uint64_t warp_best[WARPS];
  __shared__ float4 block_best;  // its first two words, as load_cluster reads them
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int sequence = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const half_bits* row = logits + static_cast<long long>(sequence) * vocabulary;
  const int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
  uint64_t best = 0;
  const int wide = vocabulary % WIDTH == 0 ? vocabulary / WIDTH : 0;
#pragma unroll 4
  for (int at = first; at < wide; at += stride) {
    const uint4 eight = load_written(reinterpret_cast<const uint4*>(row) + at);
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const uint32_t word = words[i / 2] >> (i % 2 * 16);
      best = larger(best, sort_key(static_cast<half_bits>(word), at * WIDTH + i));
    }
  }
  for (int at = wide * WIDTH + first; at < vocabulary; at += stride)
    best = larger(best, sort_key(row[at], at));
  best = warp_largest(best);
  if (lane == 0) warp_best[warp] = best;
  __syncthreads();
  best = warp_largest(warp_best[lane]);
#if __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) {
    if (threadIdx.x == 0)
      block_best = make_float4(__uint_as_float(static_cast<uint32_t>(best)),
                               __uint_as_float(static_cast<uint32_t>(best >> 32)), 0.0f, 0.0f);
    __syncwarp();
    cluster_sync();
    const float4 other = load_cluster(shared_address(&block_best), lane % gridDim.x);
    best = warp_largest(static_cast<uint64_t>(__float_as_uint(other.y)) << 32 | __float_as_uint(other.x));
    cluster_sync();  // a block may exit once no other reads its shared memory
  }
#endif
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  const int token = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
  const int position = min(positions[sequence] + 1, capacity - 1);
  tokens[sequence] = token;
  positions[sequence] = position;
  history[static_cast<long long>(sequence) * capacity + position] = token;
}
