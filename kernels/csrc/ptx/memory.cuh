// memory.cuh: loads and stores with cache hints, in global and shared memory (PTX ISA, ld, st, prefetch).
#pragma once
#include "ptx/types.cuh"

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// L2 policy for data that is read once, so that it does not evict data that is read again.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The default L2 policy.
__device__ inline uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Load 16 bytes without allocation in L1, evict-first in L2 (`policy`).
__device__ inline uint4 load_once(const uint4* global, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy));
  return v;
}

__device__ inline uint4 load_shared(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

__device__ inline uint2 load_shared_words(uint32_t shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}

__device__ inline float2 load_shared_pair(uint32_t shared) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared) : "memory");
  return v;
}

__device__ inline uint32_t load_shared_word(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
  return v;
}

__device__ inline uint32_t load_shared_half(uint32_t shared) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared) : "memory");
  return v;
}

// Load four 8x8 matrices of 16 bits, distributed as operands of mma (PTX ISA, ldmatrix); lane l passes the address of row
// l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(shared)
               : "memory");
}

// Loads of data that an earlier kernel of the stream wrote. Not ld.global.nc, which requires data that is constant
// while this kernel runs: with programmatic dependent launch, this kernel starts before the earlier one has ended.
__device__ inline uint4 load_written(const uint4* global) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global));
  return v;
}

__device__ inline float2 load_written(const float2* global) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(global));
  return v;
}

__device__ inline float load_written(const float* global) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(global));
  return v;
}

__device__ inline uint2 load_written(const uint2* global) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(global));
  return v;
}

__device__ inline uint32_t load_written(const uint32_t* global) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(global));
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

// Load past L1, of data that another kernel may be writing.
__device__ inline int load_fresh(const int* global) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(global) : "memory");
  return v;
}

// Load of what store_release stored: everything that was written before it can be read.
__device__ inline int load_acquire(const int* global) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(global) : "memory");
  return v;
}

__device__ inline void store_release(int* global, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(global), "r"(v) : "memory");
}

// Loads of constants; volatile, so that the compiler does not move them to their first use.
__device__ inline half_bits load_early(const half_bits* global) {
  half_bits value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(global));
  return value;
}

__device__ inline uint32_t load_early(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(global));
  return value;
}

__device__ inline void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}
