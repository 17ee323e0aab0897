// ptx/special_registers.cuh: a thread's SM id, and the GPU's timer.
#pragma once
#include "ptx/types.cuh"

// ns since the timer began, the same for all SMs.
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
