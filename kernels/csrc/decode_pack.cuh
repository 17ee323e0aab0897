// decode_pack.cuh: values of a token as the next linear layer's activations, quantized and packed.
//   PACKING  0  FP16          half [>= M, STRIDE]
//            1  group codes   int8 [M, 128 * STEPS], scales float [STEPS, M_PAD]: csrc/imma_pack.cu
//            2  row codes     int8 [>= M, STRIDE], scales float [M]: csrc/w8a8.cu
// STEPS is K/128 rounded up. Values are FP16 numbers, so codes are those of the unfused kernels. A thread
// has four neighbouring k, a warp 128: a group. The including source defines PACKING and A_BITS first.
#pragma once
#include "decode.cuh"
#include "quantize.cuh"

constexpr int HALVES = 0, GROUP_CODES = 1, ROW_CODES = 2;
constexpr int QUAD = 4, GROUP = 128;  // neighbouring k of a thread and of a warp
static_assert(QUAD * 32 == GROUP, "a warp has one group");

// stride: of rows, in values; scale_stride: M_PAD.
struct Packed {
  void* values;
  float* scales;
  int k, stride, scale_stride, in_mma_order;
};

__device__ inline void widen(float (&value)[QUAD], const uint2& v) {
  value[0] = half_to_float(static_cast<half_bits>(v.x));
  value[1] = half_to_float(static_cast<half_bits>(v.x >> 16));
  value[2] = half_to_float(static_cast<half_bits>(v.y));
  value[3] = half_to_float(static_cast<half_bits>(v.y >> 16));
}

__device__ inline uint2 narrow(const float (&value)[QUAD]) {
  const uint32_t a = float_to_half(value[0]), b = float_to_half(value[1]);
  const uint32_t c = float_to_half(value[2]), d = float_to_half(value[3]);
  return make_uint2(a | b << 16, c | d << 16);
}

__device__ inline uint32_t code_word(const float (&value)[QUAD], const Divisor& divisor) {
  uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < QUAD; ++j)
    word |= (static_cast<uint32_t>(code_of<A_BITS>(value[j], divisor)) & 255u) << (8 * j);
  return word;
}

__device__ inline float largest_of(const float (&value)[QUAD]) {
  return fmaxf(fmaxf(fabsf(value[0]), fabsf(value[1])), fmaxf(fabsf(value[2]), fabsf(value[3])));
}

// Where the word of a lane's four k lies in a group: in their own order, or in that of the MMA, which
// csrc/imma_layout.cuh has.
__device__ inline int mma_word(int natural) {
  return natural % 8 / 2 * 8 + natural % 2 * 4 + natural / 8;
}

// A warp packs the 128 neighbouring values of a token that begin at 4 * (vector - lane).
__device__ inline void pack_group(const float (&value)[QUAD], const Packed& to, int token, int vector) {
  const int lane = threadIdx.x % 32, step = vector / 32;
  int8_t* row = static_cast<int8_t*>(to.values) + static_cast<long long>(token) * to.stride;
  const float scale = scale_of<A_BITS>(warp_maximum(largest_of(value)));
  if (vector * QUAD >= to.stride) return;
  const int word = to.in_mma_order ? mma_word(lane) : lane;
  reinterpret_cast<uint32_t*>(row)[step * 32 + word] = code_word(value, divisor_of(scale));
  if (lane == 0) to.scales[static_cast<long long>(step) * to.scale_stride + token] = scale;
}

__device__ inline void pack_halves(const float (&value)[QUAD], const Packed& to, int token, int vector) {
  half_bits* row = static_cast<half_bits*>(to.values) + static_cast<long long>(token) * to.stride;
  if (vector * QUAD < to.k) *reinterpret_cast<uint2*>(row + vector * QUAD) = narrow(value);
}
