// w8a8.cu: what cuBLASLt's int8 GEMM needs around it.
//   quantize_rows   x half [M, K] -> codes int8 [M_PAD, K_PAD], scales float [M] (FP16 values)
//   scale_sums      sums int32 [M, N] -> y half [M, N] = sums * sx[m] * sw[n] + bias[n]
#include "quantize.cuh"

constexpr int BITS = 8;
constexpr int THREADS = 256;       // of scale_sums
constexpr int ROW_THREADS = 1024;  // of quantize_rows, which has one block a token

__device__ inline half_bits half_of(const uint4& v, int i) {
  const uint32_t word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
  return static_cast<half_bits>(i % 2 == 0 ? word : word >> 16);
}

// Symmetric quantization as kernels/formats/symmetric.py defines it, one scale a row. grid: M.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
quantize_rows(const half_bits* x, int8_t* codes, float* scales, int k, int k_padded) {
  __shared__ float partial[ROW_THREADS / 32];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const half_bits* row = x + static_cast<long long>(blockIdx.x) * k;
  // Rows of a multiple of 8 values start on 16 bytes, and 8 values are one load.
  const int vectors = k % 8 == 0 ? k / 8 : 0;
  const uint4* row_vectors = reinterpret_cast<const uint4*>(row);
  float largest = 0.0f;
  for (int at = threadIdx.x; at < vectors; at += ROW_THREADS) {
    const uint4 v = row_vectors[at];
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(half_to_float(half_of(v, i))));
  }
  for (int at = vectors * 8 + threadIdx.x; at < k; at += ROW_THREADS)
    largest = fmaxf(largest, fabsf(half_to_float(row[at])));
  largest = warp_maximum(largest);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < ROW_THREADS / 32; ++warp) largest = fmaxf(largest, partial[warp]);
  const float scale = scale_of<BITS>(largest);
  int8_t* out = codes + static_cast<long long>(blockIdx.x) * k_padded;
  for (int at = threadIdx.x; at < vectors; at += ROW_THREADS) {
    const uint4 v = row_vectors[at];
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      words[i / 4] |= (static_cast<uint32_t>(code_of<BITS>(half_to_float(half_of(v, i)), scale)) & 255u) << (i % 4 * 8);
    reinterpret_cast<uint2*>(out)[at] = make_uint2(words[0], words[1]);
  }
  for (int at = vectors * 8 + threadIdx.x; at < k_padded; at += ROW_THREADS)
    out[at] = static_cast<int8_t>(at < k ? code_of<BITS>(half_to_float(row[at]), scale) : 0);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// grid: (N / THREADS rounded up, M).
extern "C" __global__ void __launch_bounds__(THREADS)
scale_sums(const int* sums, const float* sx, const half_bits* sw, const half_bits* bias,
           half_bits* y, int n) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int feature = blockIdx.x * THREADS + threadIdx.x;
  if (feature >= n) return;
  const long long at = static_cast<long long>(blockIdx.y) * n + feature;
  float value = static_cast<float>(sums[at]) * (sx[blockIdx.y] * half_to_float(sw[feature]));
  if (bias != nullptr) value += half_to_float(bias[feature]);
  y[at] = float_to_half(value);
}
