// kv_store.cuh: a new token's keys and values, rotated and written to the cache that kv_cache.cuh reads.
// The including source defines ROTARY, HEAD_DIM and KV_BITS first.
#pragma once
#include "kv_cache.cuh"

constexpr int LANE_VALUES = 8, WRITERS = HEAD_DIM / LANE_VALUES;  // neighbouring ones; lanes that have some
static_assert(WRITERS <= 32, "a warp writes a token");

// Value i of a head at a position, rotated: halves i and i + HEAD_DIM / 2 are one complex number.
__device__ inline float rotated(const half_bits* head, const float2* angles, int i) {
  const float own = half_to_float(head[i]);
  if constexpr (!ROTARY) return own;
  constexpr int HALF = HEAD_DIM / 2;
  const float other = half_to_float(head[i < HALF ? i + HALF : i - HALF]);
  const float2 angle = angles[i % HALF];
  return i < HALF ? own * angle.x - other * angle.y : own * angle.x + other * angle.y;
}

// One warp writes a token's keys or values of a head, and to `kept` what they are when they are read.
__device__ inline void store_token(unsigned char* codes, uint32_t* scales, long long row, float* kept,
                                   const half_bits* head, const float2* angles, bool rotate, int lane) {
  float value[LANE_VALUES] = {};
  if (lane < WRITERS) {
#pragma unroll
    for (int i = 0; i < LANE_VALUES; ++i) {
      const float exact =
          rotate ? rotated(head, angles, lane * LANE_VALUES + i) : half_to_float(head[lane * LANE_VALUES + i]);
      value[i] = as_half(exact);
    }
  }
  unsigned char* at = codes + row * CODE_BYTES + lane * (LANE_VALUES * KV_BITS / 8);
  if constexpr (KV_BITS == 16) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = static_cast<uint32_t>(float_to_half(value[2 * i])) |
                 static_cast<uint32_t>(float_to_half(value[2 * i + 1])) << 16;
    if (lane < WRITERS) {
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
      for (int i = 0; i < LANE_VALUES; ++i) kept[lane * LANE_VALUES + i] = value[i];
    }
  } else {
    constexpr float TOP = (1 << KV_BITS) - 1;
    float least = lane < WRITERS ? value[0] : infinite(), most = lane < WRITERS ? value[0] : -infinite();
    if (lane < WRITERS) {
#pragma unroll
      for (int i = 1; i < LANE_VALUES; ++i) least = fminf(least, value[i]), most = fmaxf(most, value[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      least = fminf(least, __shfl_xor_sync(0xffffffffu, least, offset));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    const half_bits step_bits = float_to_half(__fdiv_rn(most - least, TOP)), least_bits = float_to_half(least);
    const float step = half_to_float(step_bits);
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < LANE_VALUES; ++i) {
      const int rounded = step == 0.0f ? 0 : __float2int_rn(__fdiv_rn(value[i] - least, step));
      const uint32_t code = static_cast<uint32_t>(min(max(rounded, 0), static_cast<int>(TOP)));
      words[KV_BITS == 8 ? i / 4 : 0] |= code << (KV_BITS == 8 ? i % 4 * 8 : i * 4);
      if (lane < WRITERS)
        kept[lane * LANE_VALUES + i] = static_cast<float>(code) * step + half_to_float(least_bits);
    }
    if (lane < WRITERS) {
      if constexpr (KV_BITS == 8) *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
      else *reinterpret_cast<uint32_t*>(at) = words[0];
    }
    if (lane == 0) scales[row] = static_cast<uint32_t>(step_bits) | static_cast<uint32_t>(least_bits) << 16;
  }
}
