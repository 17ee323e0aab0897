// w8a8.cu: what cuBLASLt's int8 GEMM needs around it.
//   quantize_rows   x half [M, K] -> codes int8 [M_PAD, K_PAD], scales float [M] (FP16 values)
//   scale_sums      sums int32 [M, N] -> y half [M, N] = sums * sx[m] * sw[n] + bias[n]
#include "ptx.cuh"

constexpr int TOP = 127;
constexpr int THREADS = 256;

// Symmetric quantization as kernels/formats/symmetric.py defines it, one scale a row. grid: M.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const half_bits* x, int8_t* codes, float* scales, int k, int k_padded) {
  __shared__ float partial[THREADS / 32];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const half_bits* row = x + static_cast<long long>(blockIdx.x) * k;
  float largest = 0.0f;
  for (int at = threadIdx.x; at < k; at += THREADS)
    largest = fmaxf(largest, fabsf(half_to_float(row[at])));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) largest = fmaxf(largest, partial[warp]);
  const float scale = half_to_float(float_to_half(__fdiv_rn(largest, static_cast<float>(TOP))));
  for (int at = threadIdx.x; at < k_padded; at += THREADS) {
    int code = 0;
    if (at < k && scale != 0.0f) {
      code = __float2int_rn(__fdiv_rn(half_to_float(row[at]), scale));
      code = min(max(code, -TOP - 1), TOP);
    }
    codes[static_cast<long long>(blockIdx.x) * k_padded + at] = static_cast<int8_t>(code);
  }
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
