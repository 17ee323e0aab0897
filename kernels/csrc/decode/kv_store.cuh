// decode/kv_store.cuh: a new token's keys and values, written to the cache that kv_cache.cuh reads.
// The including source defines HEAD_DIM and KV_BITS first. If KV_E4M3 is 1, values are rounded to the nearest E4M3
// times an FP32 scale of the KV head, and stored as halves.
#pragma once
#include "decode/kv_cache.cuh"
#include "ptx/types.cuh"

#ifndef KV_E4M3
#define KV_E4M3 0
#endif
static_assert(!KV_E4M3 || KV_BITS == 16, "FP8 numbers are stored as halves");
constexpr int LANE_VALUES = 8, WRITERS = HEAD_DIM / LANE_VALUES;  // adjacent values per lane; lanes that have values
static_assert(WRITERS <= 32, "HEAD_DIM must be at most 256: one warp writes a token");

// A lane's values of a new token's key or value.
struct LaneValues {
  float value[LANE_VALUES];  // FP16 numbers; zeros if lane >= WRITERS
};

__device__ inline LaneValues values_of(const uint4& halves) {
  const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
  LaneValues lane_values;
#pragma unroll
  for (int j = 0; j < LANE_VALUES; ++j)
    lane_values.value[j] = half_to_float(static_cast<half_bits>(words[j / 2] >> (j % 2 * 16)));
  return lane_values;
}

// x / step rounded to the nearest integer, ties to even, for x >= 0. An approximate quotient is rounded, and
// corrected by one if the remainder is more than half a step; eight IEEE divisions take far longer.
__device__ inline int nearest(float x, float step, float reciprocal) {
  constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: floats of this size are integers
  const float rounded = __fmaf_rn(x, reciprocal, ROUNDER);
  const int code = __float_as_int(rounded) - __float_as_int(ROUNDER);
  const float remainder = __fmaf_rn(ROUNDER - rounded, step, x), half = 0.5f * step;
  const bool off_by_one = fabsf(remainder) > half || (fabsf(remainder) == half && (code & 1) != 0);
  return code + (off_by_one ? (remainder > 0.0f ? 1 : -1) : 0);
}

// Integers in the order of FP16 numbers: a warp reduces integers in one instruction.
constexpr int INFINITE_RANK = 0x7c00;
__device__ inline int rank_of(float number) {
  const int bits = static_cast<short>(float_to_half(number));
  return bits < 0 ? bits ^ 0x7fff : bits;
}
__device__ inline float of_rank(int rank) {
  return half_to_float(static_cast<half_bits>(rank < 0 ? rank ^ 0x7fff : rank));
}

// The nearest E4M3 times scale, as FP16; ties to even, saturated at 448.
__device__ inline float nearest_e4m3(float value, float scale) {
  constexpr int MANTISSA = 3, LEAST_EXPONENT = -6, BIAS = 127;
  const float quotient = fminf(fmaxf(__fdiv_rn(value, scale), -448.0f), 448.0f);
  const int exponent = max((__float_as_int(fabsf(quotient)) >> 23) - BIAS, LEAST_EXPONENT) - MANTISSA;
  const float step = __int_as_float((BIAS + exponent) << 23), inverse = __int_as_float((BIAS - exponent) << 23);
  return half_to_float(float_to_half(__fmul_rn(rintf(quotient * inverse) * step, scale)));
}

// dequantized: aligned to 16 bytes.
__device__ inline void store_dequantized(float* dequantized, const float (&value)[LANE_VALUES]) {
  float4* to = reinterpret_cast<float4*>(dequantized + threadIdx.x % 32 * LANE_VALUES);
  to[0] = make_float4(value[0], value[1], value[2], value[3]);
  to[1] = make_float4(value[4], value[5], value[6], value[7]);
}

// Write a token's key or value to the cache, by one warp; dequantized: as later steps read it. scales: of its cache,
// or with KV_E4M3 FP32 [KV heads]; blockIdx.y is the KV head.
__device__ inline void store_token(unsigned char* codes, uint32_t* scales, long long row, float* dequantized,
                                   const LaneValues& lane_values) {
  const int lane = threadIdx.x % 32;
  float value[LANE_VALUES];
#pragma unroll
  for (int i = 0; i < LANE_VALUES; ++i) {
    value[i] = lane_values.value[i];
    if constexpr (KV_E4M3 != 0) value[i] = nearest_e4m3(value[i], __uint_as_float(scales[blockIdx.y]));
  }
  unsigned char* at = codes + row * CODE_BYTES + lane * (LANE_VALUES * KV_BITS / 8);
  if constexpr (KV_BITS == 16) {
    if (lane >= WRITERS) return;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = static_cast<uint32_t>(float_to_half(value[2 * i])) |
                 static_cast<uint32_t>(float_to_half(value[2 * i + 1])) << 16;
    *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    store_dequantized(dequantized, value);
  } else {
    constexpr float TOP = (1 << KV_BITS) - 1;
    float minimum = value[0], maximum = value[0];
#pragma unroll
    for (int i = 1; i < LANE_VALUES; ++i) minimum = fminf(minimum, value[i]), maximum = fmaxf(maximum, value[i]);
    const int lowest = __reduce_min_sync(0xffffffffu, lane < WRITERS ? rank_of(minimum) : INFINITE_RANK);
    const int highest = __reduce_max_sync(0xffffffffu, lane < WRITERS ? rank_of(maximum) : -INFINITE_RANK);
    minimum = of_rank(lowest), maximum = of_rank(highest);
    const half_bits step_bits = float_to_half(__fdiv_rn(maximum - minimum, TOP)), minimum_bits = float_to_half(minimum);
    const float step = half_to_float(step_bits), reciprocal = step == 0.0f ? 0.0f : __fdividef(1.0f, step);
    uint32_t words[2] = {};
    if (lane >= WRITERS) return;
    float read_back[LANE_VALUES];
#pragma unroll
    for (int i = 0; i < LANE_VALUES; ++i) {
      const int rounded = step == 0.0f ? 0 : nearest(value[i] - minimum, step, reciprocal);
      const uint32_t code = static_cast<uint32_t>(min(max(rounded, 0), static_cast<int>(TOP)));
      words[KV_BITS == 8 ? i / 4 : 0] |= code << (KV_BITS == 8 ? i % 4 * 8 : i * 4);
      read_back[i] = static_cast<float>(code) * step + minimum;
    }
    store_dequantized(dequantized, read_back);
    if constexpr (KV_BITS == 8) *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    else *reinterpret_cast<uint32_t*>(at) = words[0];
    if (lane == 0) scales[row] = static_cast<uint32_t>(step_bits) | static_cast<uint32_t>(minimum_bits) << 16;
  }
}
