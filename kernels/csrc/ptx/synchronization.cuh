// synchronization.cuh: flags in global memory between blocks, and named barriers between warps of a block
// (PTX ISA, memory consistency model; bar.sync).
#pragma once
#include "ptx/types.cuh"

#if __CUDA_ARCH__ >= 900
// Release and acquire of a flag between blocks: writes before a block's barrier and release_flag are visible to
// another block after its acquire_flag and barrier.
__device__ inline void release_flag(int* flag, int value) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline int acquire_flag(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ inline float4 load_uncached(const float4* global) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(global)
               : "memory");
  return v;
}

// Two floats, each with a mark in the same 8 bytes: a reader of the mark has the value, without a fence.
struct Marked {
  uint64_t words[2];

  __device__ inline Marked() {}
  __device__ inline Marked(float a, float b, int mark) {
    asm("mov.b64 %0, {%1, %2};" : "=l"(words[0]) : "f"(a), "r"(mark));
    asm("mov.b64 %0, {%1, %2};" : "=l"(words[1]) : "f"(b), "r"(mark));
  }
  __device__ inline bool has(int mark) const {
    return static_cast<int>(words[0] >> 32) == mark && static_cast<int>(words[1] >> 32) == mark;
  }
  __device__ inline float value(int i) const { return __uint_as_float(static_cast<uint32_t>(words[i])); }
};

__device__ inline void store_marked(Marked* to, const Marked& v) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1,%2};" ::"l"(to), "l"(v.words[0]), "l"(v.words[1]) : "memory");
}

__device__ inline Marked load_marked(const Marked* from) {
  Marked v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
               : "=l"(v.words[0]), "=l"(v.words[1])
               : "l"(from)
               : "memory");
  return v;
}
#endif

// Barriers of some warps of a block. threads: all that arrive, including those that wait.
__device__ inline void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
