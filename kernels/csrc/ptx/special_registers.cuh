// ptx/special_registers.cuh: a thread's SM id, and the GPU's timer.
#pragma once
#include "ptx/types.cuh"

// Nanoseconds; all SMs read the same timer.
__device__ inline long long global_ns() {
  long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ inline uint32_t sm_number() {
  uint32_t number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}
