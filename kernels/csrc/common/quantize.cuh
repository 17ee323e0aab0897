// common/quantize.cuh: FlexQ's quantization formula (kernels/formats/symmetric_quantization.py), bit for bit, and
// bit planes of codes. Used by every packing kernel.
#pragma once
#include "ptx/types.cuh"

template <int WIDTH>
constexpr int TOP_CODE = (1 << (WIDTH - 1)) - 1;

// FP16 scale of values whose largest magnitude is `largest`, as a float.
template <int WIDTH>
__device__ inline float scale_of(float largest) {
  return half_to_float(float_to_half(__fdiv_rn(largest, static_cast<float>(TOP_CODE<WIDTH>))));
}

// Constants of code_of, computed once per scale.
struct Divisor {
  float scale, reciprocal, half;
};

// If the scale is zero in FP16, all codes are zero.
__device__ inline Divisor divisor_of(float scale) {
  if (scale == 0.0f) return {0.0f, 0.0f, __int_as_float(0x7f800000)};
  return {scale, __fdividef(1.0f, scale), 0.5f * scale};
}

// value / scale rounded to the nearest integer, ties to even, and clamped; both are FP16 numbers. An IEEE
// division takes three times the instructions: here an approximate quotient is rounded, and corrected by one
// if the remainder, which is exact, is more than half a scale.
template <int WIDTH>
__device__ inline int code_of(float value, const Divisor& divisor) {
  constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: floats of this size are integers
  const float rounded = __fmaf_rn(value, divisor.reciprocal, ROUNDER);
  const int code = __float_as_int(rounded) - __float_as_int(ROUNDER);
  const float remainder = __fmaf_rn(ROUNDER - rounded, divisor.scale, value);
  const bool off_by_one = fabsf(remainder) > divisor.half || (fabsf(remainder) == divisor.half && (code & 1) != 0);
  const int nearest = code + (off_by_one ? (remainder > 0.0f ? 1 : -1) : 0);
  return min(max(nearest, -TOP_CODE<WIDTH> - 1), TOP_CODE<WIDTH>);
}

// Maximum of non-negative floats: their bits have the same order, and integers need one instruction (redux.sync).
__device__ inline float warp_maximum(float magnitude) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(magnitude)));
}

// Ballot of the lanes whose value has `bit` set. In PTX: __ballot_sync of the expression takes one more shift.
__device__ inline uint32_t ballot_of(int value, uint32_t bit) {
  uint32_t lanes;
  asm volatile(
      "{.reg .pred set; .reg .b32 masked; and.b32 masked, %1, %2; setp.ne.u32 set, masked, 0;"
      " vote.sync.ballot.b32 %0, set, 0xffffffff;}"
      : "=r"(lanes)
      : "r"(value), "r"(bit));
  return lanes;
}

// Bit planes of 128 consecutive k of a row, by one warp: code[w] of lane l belongs to k = 32·w + l.
// Lane `plane` returns the four words of its plane.
template <int WIDTH>
__device__ inline uint4 ballot_planes(const int (&code)[4], int lane) {
  uint32_t words[4] = {};
#pragma unroll
  for (int plane = 0; plane < WIDTH; ++plane) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t word = ballot_of(code[w], 1u << plane);
      if (lane == plane) words[w] = word;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
