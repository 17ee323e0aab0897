// common/quantize.cuh: FlexQ's quantization formula (kernels/formats/symmetric_quantization.py), bit for bit, and
// bit planes of codes. Used by every packing kernel.
#pragma once
#include "ptx/types.cuh"

template <int WIDTH>
constexpr int TOP_CODE = (1 << (WIDTH - 1)) - 1;

// The FP16 scale of values whose largest magnitude is `largest`, as a float.
template <int WIDTH>
__device__ inline float scale_of(float largest) {
  return half_to_float(float_to_half(__fdiv_rn(largest, static_cast<float>(TOP_CODE<WIDTH>))));
}

// What code_of needs of a scale, computed once for all values that share it.
struct Divisor {
  float scale, reciprocal, half;
};

// A scale that is zero in FP16 has codes of zero.
__device__ inline Divisor divisor_of(float scale) {
  if (scale == 0.0f) return {0.0f, 0.0f, __int_as_float(0x7f800000)};
  return {scale, __fdividef(1.0f, scale), 0.5f * scale};
}

// The integer next to value / scale, ties to even; both are FP16 numbers. An IEEE division takes three
// times the instructions: here an approximate quotient is rounded, and what it leaves of the value, which
// is exact, tells whether it fell on the wrong side of a tie.
template <int WIDTH>
__device__ inline int code_of(float value, const Divisor& by) {
  constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: past it, floats are integers
  const float rounded = __fmaf_rn(value, by.reciprocal, ROUNDER);
  const int code = __float_as_int(rounded) - __float_as_int(ROUNDER);
  const float left = __fmaf_rn(ROUNDER - rounded, by.scale, value);
  const bool beyond = fabsf(left) > by.half || (fabsf(left) == by.half && (code & 1) != 0);
  const int nearest = code + (beyond ? (left > 0.0f ? 1 : -1) : 0);
  return min(max(nearest, -TOP_CODE<WIDTH> - 1), TOP_CODE<WIDTH>);
}

// Of magnitudes: floats without a sign are in the order of their bits, and one instruction takes those.
__device__ inline float warp_maximum(float magnitude) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(magnitude)));
}

// Which lanes have a bit set. In PTX, because __ballot_sync of an expression costs a shift more.
__device__ inline uint32_t ballot_of(int value, uint32_t bit) {
  uint32_t lanes;
  asm volatile(
      "{.reg .pred set; .reg .b32 masked; and.b32 masked, %1, %2; setp.ne.u32 set, masked, 0;"
      " vote.sync.ballot.b32 %0, set, 0xffffffff;}"
      : "=r"(lanes)
      : "r"(value), "r"(bit));
  return lanes;
}

// One warp, 128 neighbouring k of a row: lane l holds the codes at k = 32·w + l.
// Lane `plane` keeps the four words of its plane.
template <int WIDTH>
__device__ inline uint4 ballot_planes(const int (&code)[4], int lane) {
  uint32_t kept[4] = {};
#pragma unroll
  for (int plane = 0; plane < WIDTH; ++plane) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t word = ballot_of(code[w], 1u << plane);
      if (lane == plane) kept[w] = word;
    }
  }
  return make_uint4(kept[0], kept[1], kept[2], kept[3]);
}
