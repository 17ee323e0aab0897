// decode.cuh: what the kernels between a decoder's linear layers share.
#pragma once
#include "ptx.cuh"

__device__ inline float infinite() { return __int_as_float(0x7f800000); }

__device__ inline float as_half(float value) { return half_to_float(float_to_half(value)); }
