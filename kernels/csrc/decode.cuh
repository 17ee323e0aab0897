// decode.cuh: what the kernels between a decoder's linear layers share.
#pragma once
#include "ptx.cuh"

__device__ inline float infinite() { return __int_as_float(0x7f800000); }

__device__ inline float as_half(float value) { return half_to_float(float_to_half(value)); }

// 2^x; 0 where a float has no digits left.
__device__ inline float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ inline uint2 load_written(const uint2* global) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(global));
  return v;
}

__device__ inline uint32_t load_written(const uint16_t* global) {
  uint16_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(global));
  return v;
}

__device__ inline uint32_t load_written(const uint8_t* global) {
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(global));
  return v;
}
