// quantize.cuh: symmetric quantization as kernels/formats/symmetric.py defines it, bit for bit, and bit
// planes of codes. The one home of both for every packing kernel.
#pragma once
#include "ptx.cuh"

template <int WIDTH>
constexpr int TOP_CODE = (1 << (WIDTH - 1)) - 1;

// The FP16 scale of values whose largest magnitude is `largest`, as a float.
template <int WIDTH>
__device__ inline float scale_of(float largest) {
  return half_to_float(float_to_half(__fdiv_rn(largest, static_cast<float>(TOP_CODE<WIDTH>))));
}

// A scale that is zero in FP16 has codes of zero.
template <int WIDTH>
__device__ inline int code_of(float value, float scale) {
  // An IEEE division: a reciprocal would put quotients on the wrong side of a tie.
  const int rounded = scale == 0.0f ? 0 : __float2int_rn(__fdiv_rn(value, scale));
  return min(max(rounded, -TOP_CODE<WIDTH> - 1), TOP_CODE<WIDTH>);
}

__device__ inline float warp_maximum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
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
      const uint32_t word = __ballot_sync(0xffffffffu, (code[w] >> plane) & 1);
      if (lane == plane) kept[w] = word;
    }
  }
  return make_uint4(kept[0], kept[1], kept[2], kept[3]);
}
