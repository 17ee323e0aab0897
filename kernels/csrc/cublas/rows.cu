// cublas/rows.cu: quantization before cuBLAS's 8-bit GEMMs and scaling after them, row by row.
//   quantize_rows   x half [M, K] -> codes [M_PAD, K_PAD], scales float [M] (FP16 values); in_mma_order:
//                   each 128 k in the order of imma/mma_order.cuh, K_PAD a multiple of 128
//   quantize_groups E4M3 and HALVES only: a scale for each 128 k, scales float [K/128, M_PAD], the sources' rows past M
//                   get scales of zero
//   scale_sums      sums [M, SUMS_STRIDE] -> y half [M, N] = sums * sx[m] * sw[n] + bias[n]
// Codes are int8 and sums int32; with E4M3 1 codes are FP8 (E4M3) and sums float. HALVES 1: codes are halves of the same
// values, for FP16 tensor cores; in_mma_order is not available.
#include "common/quantize.cuh"
#include "imma/mma_order.cuh"
#include "ptx/launch.cuh"
#include "ptx/types.cuh"

#ifndef E4M3
#define E4M3 0
#endif
#ifndef HALVES
#define HALVES 0
#endif
#if E4M3 && !HALVES && __CUDA_ARCH__ < 890
#error "E4M3 codes of one byte need compute capability 8.9"
#endif
constexpr int THREADS = 128;       // of scale_sums
constexpr int FEATURES = 4;        // of a thread of scale_sums
constexpr int ROW_THREADS = 1024;  // of quantize_rows, which has one block per token

#if E4M3
using Sum = float;
using RowDivisor = float;
using Sums = float4;

// The formula of kernels/formats/fp8.py, bit for bit except for the sign of zeros.
__device__ inline float row_scale(float largest) {
  return half_to_float(float_to_half(__fdiv_rn(largest, 448.0f)));
}

__device__ inline RowDivisor row_divisor(float scale) { return scale; }

__device__ inline uint32_t row_code(float value, RowDivisor scale) {
  const float quotient = scale == 0.0f ? 0.0f : __fdiv_rn(value, scale);
#if HALVES
  // Adding a large number of the right exponent rounds to three bits of mantissa, or to 2^-9 if subnormal.
  const int exponent = max(__float_as_int(quotient) >> 23 & 255, 127 - 6);
  const float rounder = __int_as_float((exponent + 20) << 23 | 0x400000);
  const float rounded = __fadd_rn(__fadd_rn(quotient, rounder), -rounder);
  return float_to_half(fminf(fmaxf(rounded, -448.0f), 448.0f));
#else
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(quotient));
  return pair & 255u;  // the second operand is the lower byte
#endif
}
#else
using Sum = int;
using RowDivisor = Divisor;
using Sums = int4;

// Codes of quantize.cuh with one scale per row.
__device__ inline float row_scale(float largest) { return scale_of<8>(largest); }

__device__ inline RowDivisor row_divisor(float scale) { return divisor_of(scale); }

__device__ inline uint32_t row_code(float value, const RowDivisor& divisor) {
  const int code = code_of<8>(value, divisor);
  return HALVES ? float_to_half(static_cast<float>(code)) : static_cast<uint32_t>(code) & 255u;
}
#endif

#if HALVES
using Code = half_bits;
#else
using Code = uint8_t;
#endif
constexpr int CODE_BITS = 8 * sizeof(Code);

__device__ inline half_bits half_of(const uint4& v, int i) {
  const uint32_t word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
  return static_cast<half_bits>(i % 2 == 0 ? word : word >> 16);
}

// One scale per row, or *fixed_scale for all rows unless it is null. grid: M.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
quantize_rows(const half_bits* x, Code* codes, float* scales, int k, int k_padded,
              const float* fixed_scale, int in_mma_order) {
  __shared__ float partial[ROW_THREADS / 32];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const half_bits* row = x + static_cast<long long>(blockIdx.x) * k;
  // If k is a multiple of 8, rows are aligned to 16 bytes and 8 values are one load.
  const int vectors = k % 8 == 0 ? k / 8 : 0, searched = fixed_scale == nullptr ? k : 0;
  const uint4* row_vectors = reinterpret_cast<const uint4*>(row);
  float largest = 0.0f;
  for (int at = threadIdx.x; at * 8 < min(vectors * 8, searched); at += ROW_THREADS) {
    const uint4 v = row_vectors[at];
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(half_to_float(half_of(v, i))));
  }
  for (int at = vectors * 8 + threadIdx.x; at < searched; at += ROW_THREADS)
    largest = fmaxf(largest, fabsf(half_to_float(row[at])));
  largest = warp_maximum(largest);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < ROW_THREADS / 32; ++warp) largest = fmaxf(largest, partial[warp]);
  const float scale = fixed_scale == nullptr ? row_scale(largest) : *fixed_scale;
  const RowDivisor divisor = row_divisor(scale);
  Code* out = codes + static_cast<long long>(blockIdx.x) * k_padded;
  for (int at = threadIdx.x; at < vectors; at += ROW_THREADS) {
    const uint4 v = row_vectors[at];
    uint32_t words[CODE_BITS / 4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      words[i * CODE_BITS / 32] |= row_code(half_to_float(half_of(v, i)), divisor) << i * CODE_BITS % 32;
#if HALVES
    reinterpret_cast<uint4*>(out)[at] = make_uint4(words[0], words[1], words[2], words[3]);
#else
    if (in_mma_order) {
      uint32_t* group = reinterpret_cast<uint32_t*>(out) + at / 16 * 32;
      group[mma_word(at % 16 * 2)] = words[0], group[mma_word(at % 16 * 2 + 1)] = words[1];
    } else {
      reinterpret_cast<uint2*>(out)[at] = make_uint2(words[0], words[1]);
    }
#endif
  }
  for (int at = vectors * 8 + threadIdx.x; at < k_padded; at += ROW_THREADS) {
    const int to = in_mma_order ? at / 128 * 128 + mma_word(at % 128 / 4) * 4 + at % 4 : at;
    out[to] = static_cast<Code>(at < k ? row_code(half_to_float(row[at]), divisor) : 0u);
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

#if E4M3 && HALVES
// A warp quantizes 128 k of a token. grid: (K/128 rounded up, M_PAD), one warp a block.
extern "C" __global__ void __launch_bounds__(32)
quantize_groups(const half_bits* x, Code* codes, float* scales, int m, int k, int k_padded) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = threadIdx.x, token = blockIdx.y;
  float value[4] = {}, largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = blockIdx.x * 128 + i * 32 + lane;
    if (token < m && at < k) value[i] = half_to_float(x[static_cast<long long>(token) * k + at]);
    largest = fmaxf(largest, fabsf(value[i]));
  }
  const float scale = row_scale(warp_maximum(largest));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = blockIdx.x * 128 + i * 32 + lane;
    if (token < m && at < k_padded)
      codes[static_cast<long long>(token) * k_padded + at] = static_cast<Code>(row_code(value[i], scale));
  }
  if (lane == 0) scales[blockIdx.x * gridDim.y + token] = scale;
}
#endif

// True if FEATURES adjacent halves of a row of n can be one access.
__device__ inline bool is_aligned(const half_bits* row, int n) {
  return n % FEATURES == 0 && reinterpret_cast<uint64_t>(row) % (FEATURES * sizeof(half_bits)) == 0;
}

// FEATURES adjacent halves; zeros from index n on.
__device__ inline void load_features(float (&value)[FEATURES], const half_bits* from, int first, int n) {
  if (is_aligned(from, n)) {
    const uint2 v = *reinterpret_cast<const uint2*>(from + first);
#pragma unroll
    for (int i = 0; i < FEATURES; ++i)
      value[i] = half_to_float(static_cast<half_bits>((i < 2 ? v.x : v.y) >> (i % 2 * 16)));
  } else {
#pragma unroll
    for (int i = 0; i < FEATURES; ++i)
      value[i] = first + i < n ? half_to_float(from[first + i]) : 0.0f;
  }
}

// A thread scales FEATURES adjacent features, in one access if rows are aligned.
// grid: (N / (THREADS * FEATURES) rounded up, M).
extern "C" __global__ void __launch_bounds__(THREADS)
scale_sums(const Sum* sums, const float* sx, const half_bits* sw, const half_bits* bias,
           half_bits* y, int n, int sums_stride) {
  let_next_kernel_start();
  const int first = (blockIdx.x * THREADS + threadIdx.x) * FEATURES;
  if (first >= n) return;
  float scale[FEATURES], value[FEATURES] = {};
  load_features(scale, sw, first, n);  // constant, so loaded before the GEMM has ended
  if (bias != nullptr) load_features(value, bias, first, n);
  wait_for_previous_kernel();
  const Sum* row_sums = sums + static_cast<long long>(blockIdx.y) * sums_stride + first;
  Sum sum[FEATURES] = {};
  if (sums_stride % FEATURES == 0) {  // rows may be longer than n, never shorter
    const Sums v = *reinterpret_cast<const Sums*>(row_sums);
    sum[0] = v.x, sum[1] = v.y, sum[2] = v.z, sum[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < FEATURES; ++i) sum[i] = first + i < n ? row_sums[i] : Sum(0);
  }
  const float token_scale = sx[blockIdx.y];
  uint32_t halves[FEATURES];
#pragma unroll
  for (int i = 0; i < FEATURES; ++i)
    halves[i] = float_to_half(value[i] + static_cast<float>(sum[i]) * (token_scale * scale[i]));
  half_bits* out = y + static_cast<long long>(blockIdx.y) * n + first;
  if (is_aligned(out, n)) {
    *reinterpret_cast<uint2*>(out) =
        make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < FEATURES; ++i)
      if (first + i < n) out[i] = static_cast<half_bits>(halves[i]);
  }
}
