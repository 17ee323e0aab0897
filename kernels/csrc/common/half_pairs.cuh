// common/half_pairs.cuh: arithmetic on two halves in a word, their conversion, and integers as halves: 0x6400 | u is
// the half 1024 + u.
#pragma once
#include "ptx/types.cuh"

__device__ inline uint32_t add_half2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ inline uint32_t multiply_half2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ inline uint32_t subtract_half2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ inline uint32_t multiply_add_half2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// (bits & MASK) | 1024.0 in both halves: one lop3; the compiler generates two instructions.
template <uint32_t MASK>
__device__ inline uint32_t biased_halves(uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(bits), "n"(MASK), "r"(0x64006400u));
  return d;
}

#if __CUDA_ARCH__ >= 890
// The nearest E4M3 numbers of four halves, the lowest byte first; ties to even, saturated.
__device__ inline uint32_t e4m3_of(uint32_t low, uint32_t high) {
  uint32_t d;
  asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f16x2 l, %1;\ncvt.rn.satfinite.e4m3x2.f16x2 h, %2;\n"
      "mov.b32 %0, {l, h};\n}"
      : "=r"(d)
      : "r"(low), "r"(high));
  return d;
}
#endif
