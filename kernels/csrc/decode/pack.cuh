// decode/pack.cuh: quantizes and packs a token's values, four adjacent k per lane, for a linear layer.
// The including source defines A_BITS, the width of codes.
#pragma once
#include "common/quantize.cuh"
#include "decode/math.cuh"
#include "imma/mma_order.cuh"
#include "ptx/types.cuh"

constexpr int HALVES = 0, GROUP_CODES = 1, ROW_CODES = 2;  // PACKING
constexpr int WIDTH = 4, GROUP = 128;                      // adjacent k of a lane and of a warp
static_assert(WIDTH * 32 == GROUP, "GROUP must be the k of a warp");

__device__ inline uint2 narrow(const float (&value)[WIDTH]) {
  const uint32_t a = float_to_half(value[0]), b = float_to_half(value[1]);
  const uint32_t c = float_to_half(value[2]), d = float_to_half(value[3]);
  return make_uint2(a | b << 16, c | d << 16);
}

__device__ inline uint32_t code_word(const float (&value)[WIDTH], const Divisor& divisor) {
  uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < WIDTH; ++j)
    word |= (static_cast<uint32_t>(code_of<A_BITS>(value[j], divisor)) & 255u) << (8 * j);
  return word;
}

__device__ inline float largest_of(const float (&value)[WIDTH]) {
  return fmaxf(fmaxf(fabsf(value[0]), fabsf(value[1])), fmaxf(fabsf(value[2]), fabsf(value[3])));
}

// Quantize one group of a token, by one warp. row: the token's codes.
__device__ inline void write_group(const float (&value)[WIDTH], int8_t* row, float* scale_of_group, int step,
                                   bool in_mma_order, bool inside) {
  const int lane = threadIdx.x % 32;
  const float scale = scale_of<A_BITS>(warp_maximum(largest_of(value)));
  if (!inside) return;
  reinterpret_cast<uint32_t*>(row)[step * 32 + (in_mma_order ? mma_word(lane) : lane)] =
      code_word(value, divisor_of(scale));
  if (lane == 0) *scale_of_group = scale;
}
