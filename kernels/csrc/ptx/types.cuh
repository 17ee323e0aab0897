// types.cuh: integer types and halves as bits. Sources include no CUDA header, so that NVRTC compiles them alone.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int8_t = signed char;
using half_bits = uint16_t;  // an IEEE half as its bits

__device__ inline float half_to_float(half_bits h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

__device__ inline half_bits float_to_half(float f) {
  half_bits h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

__device__ inline uint16_t float_to_bfloat(float f) {
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

// A value that is equal in all lanes of a warp, made known as such: the compiler then uses uniform registers.
__device__ inline int warp_uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// The same value, opaque to the compiler: expressions of it are recomputed, not kept in registers.
__device__ inline int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Bits of a where MASK is 1, of b where it is 0.
template <uint32_t MASK>
__device__ inline uint32_t selected_bits(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(d) : "r"(a), "n"(MASK), "r"(b));
  return d;
}
