// decode.cuh: what the kernels between a decoder's linear layers share.
#pragma once
#include "ptx.cuh"

__device__ inline float infinite() { return __int_as_float(0x7f800000); }

__device__ inline float as_half(float value) { return half_to_float(float_to_half(value)); }

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
