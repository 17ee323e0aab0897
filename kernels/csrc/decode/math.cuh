// decode/math.cuh: arithmetic of the non-GEMM operators of a decoder block.
#pragma once
#include "ptx/types.cuh"

__device__ inline float infinite() { return __int_as_float(0x7f800000); }

__device__ inline float as_half(float value) { return half_to_float(float_to_half(value)); }

// 2^x; subnormal results are flushed to 0.
__device__ inline float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
