// abq/pack.cu: operands of the arbitrary-bit kernel (abq/gemm.cu), packed with warp ballots.
//
//   pack_codes     codes int8 [ROWS, K] -> planes uint32 [.., CHUNKS, 4], 128 values of k in a chunk
//   quantize_pack  x half [M, K]        -> planes of its codes [M, BITS, CHUNKS, 4], scale float [M]
//
// Plane `bit` of row r is row r·row_step + bit·plane_step of the planes: (1, ROWS) gives the
// [bit][row][K/32] of weights, (BITS, 1) the [token][bit][K/32] of activations. CHUNKS = K/128 rounded
// up; padding is zero. A word holds 32 values of k, lowest k in the lowest bit. The scale of a
// token is exactly an FP16 value.
#include "common/quantize.cuh"
#include "ptx/launch.cuh"
#include "ptx/types.cuh"

#ifndef BITS
#error "define BITS, the width of a code"
#endif
constexpr int CHUNK_K = 128, WORDS = CHUNK_K / 32;
constexpr int WARPS = 8;  // of a block

// grid: (ROWS, CHUNKS / WARPS rounded up); one warp per chunk.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
pack_codes(const int8_t* codes, uint4* planes, int k, int row_step, int plane_step) {
  const int lane = threadIdx.x % 32, chunks = (k + CHUNK_K - 1) / CHUNK_K;
  const int chunk = blockIdx.y * WARPS + threadIdx.x / 32;
  const long long row = blockIdx.x;
  if (chunk >= chunks) return;
  int code[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const int at = chunk * CHUNK_K + w * 32 + lane;
    code[w] = at < k ? codes[row * k + at] : 0;
  }
  const uint4 words = ballot_planes<BITS>(code, lane);
  const long long plane_row = row * row_step + static_cast<long long>(lane) * plane_step;
  if (lane < BITS) planes[plane_row * chunks + chunk] = words;
}

__device__ inline uint32_t larger_magnitude(uint32_t largest, uint32_t two_halves) {
  // Bits of non-negative finite halves have the order of their values.
  return max(largest, max(two_halves & 0x7fffu, (two_halves >> 16) & 0x7fffu));
}

// Bits of the largest |x| of a row, the same in every thread of the block.
__device__ inline half_bits row_maximum(const half_bits* row, int k) {
  __shared__ uint32_t warp_maxima[WARPS];
  uint32_t largest = 0;
  const bool aligned = reinterpret_cast<uint64_t>(row) % sizeof(uint4) == 0;
  const int vectors = aligned ? k / 8 : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += WARPS * 32) {
    const uint4 eight = reinterpret_cast<const uint4*>(row)[i];
    largest = larger_magnitude(largest, eight.x);
    largest = larger_magnitude(largest, eight.y);
    largest = larger_magnitude(largest, eight.z);
    largest = larger_magnitude(largest, eight.w);
  }
  for (int at = vectors * 8 + threadIdx.x; at < k; at += WARPS * 32)
    largest = larger_magnitude(largest, row[at]);
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) largest = max(largest, warp_maxima[w]);
  return static_cast<half_bits>(largest);
}

// Codes of quantize.cuh with one scale per row.
// grid: (M, slices of the chunks); the blocks of all slices compute the maximum of the row.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
quantize_pack(const half_bits* x, uint4* planes, float* scale_out, int k) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, chunks = (k + CHUNK_K - 1) / CHUNK_K;
  const long long token = blockIdx.x;
  const half_bits* row = x + token * k;
  const float largest = half_to_float(row_maximum(row, k));
  const float scale = scale_of<BITS>(largest);
  const Divisor divisor = divisor_of(scale);
  if (blockIdx.y == 0 && threadIdx.x == 0) scale_out[token] = scale;
  for (int chunk = blockIdx.y * WARPS + threadIdx.x / 32; chunk < chunks; chunk += gridDim.y * WARPS) {
    int code[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const int at = chunk * CHUNK_K + w * 32 + lane;
      const float value = at < k ? half_to_float(row[at]) : 0.0f;
      code[w] = code_of<BITS>(value, divisor);
    }
    const uint4 words = ballot_planes<BITS>(code, lane);
    if (lane < BITS) planes[(token * BITS + lane) * chunks + chunk] = words;
  }
}
