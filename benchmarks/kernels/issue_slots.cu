// What a Hopper SM does beside int8 warpgroup MMA. Needs nvcc 12 or later and an H100 or H200:
//
//   nvcc -std=c++17 -O3 -Ikernels/csrc -gencode=arch=compute_90a,code=sm_90a \
//     benchmarks/kernels/issue_slots.cu && ./a.out
//
// One warpgroup of a block multiplies 64x128x32, eight in a chain, until another one has issued its
// instructions, all of one kind in as many chains of dependence as said. Cycles that each takes alone and both
// take together. docs/kernels/flexq-imma.md says what follows.
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

#include "ptx/memory.cuh"
#include "ptx/synchronization.cuh"
#include "ptx/wgmma.cuh"

constexpr int BLOCKS = 132, SHARED_BYTES = 128 * 1024, TOKENS_AT = 64 * 1024, CHAINED = 8;

__device__ void fill(uint32_t* shared) {
  uint32_t state = threadIdx.x * 747796405u + blockIdx.x * 2891336453u + 1;
  for (int i = threadIdx.x; i < SHARED_BYTES / 4; i += blockDim.x) {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
      state = state * 1664525u + 1013904223u;
      word |= static_cast<uint32_t>(static_cast<int>(state >> 26) - 32 & 0xFF) << (8 * b);
    }
    shared[i] = word;
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fence_async_proxy();
#endif
  __syncthreads();
}

enum Kind { FFMA, FFMA_IN_TWO_CHAINS, FMUL, I2F, LOP3, IMAD, HFMA2, KINDS };
constexpr const char* NAMES[KINDS] = {"FFMA", "FFMA, 2 chains", "FMUL", "I2F", "LOP3", "IMAD", "HFMA2"};

template <int KIND>
__device__ __forceinline__ void arithmetic(float (&t)[64], int (&s)[64], float factor, float summand) {
  const int a = __float_as_int(factor), b = __float_as_int(summand);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const float other = __int_as_float(s[KIND == FFMA ? i : i % 8]);
    if (KIND == FFMA) asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(t[i]) : "f"(other), "f"(factor));
    if (KIND == FFMA_IN_TWO_CHAINS) asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(t[i % 2]) : "f"(other), "f"(factor));
    if (KIND == FMUL) asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(t[i]) : "f"(factor));
    if (KIND == I2F) asm volatile("{.reg .f32 f;\ncvt.rn.f32.s32 f, %0;\nmov.b32 %0, f;}" : "+r"(s[i]));
    if (KIND == LOP3) asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(s[i]) : "r"(a), "r"(b));
    if (KIND == IMAD) asm volatile("mad.lo.s32 %0, %0, %1, %2;" : "+r"(s[i]) : "r"(a), "r"(b));
    if (KIND == HFMA2) asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(s[i]) : "r"(a), "r"(b));
  }
}

struct Taken {
  long long multiplying, multiplications, issuing;  // cycles, how many, cycles
};

template <int KIND>
__global__ void __launch_bounds__(256, 1) both(Taken* taken, int rounds, bool multiplies, bool issues) {
  extern __shared__ __align__(1024) uint32_t shared[];
  __shared__ volatile int done, seen;
  if (threadIdx.x == 0) done = seen = 0;
  fill(shared);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (threadIdx.x < 128) {
    const uint32_t tokens = shared_address(shared) + TOKENS_AT;
    const uint32_t a[4] = {shared[threadIdx.x], shared[threadIdx.x + 128], shared[threadIdx.x + 256],
                           shared[threadIdx.x + 384]};
    int d[64] = {}, round = 0;
    const long long begin = clock64();
    while (multiplies && (issues || round < rounds)) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < CHAINED; ++i) wgmma_s8_k32(d, a, swizzled_descriptor(tokens + i % 4 * 32), true);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 64; ++i) asm volatile("" : "+r"(d[i])::"memory");
      ++round;
      if (issues && round % 4 == 0) {  // all warps learn of the end in the same round
        if (threadIdx.x == 0) seen = done;
        named_barrier_sync(4, 128);
        if (seen) break;
        named_barrier_sync(4, 128);
      }
    }
    const long long cycles = clock64() - begin;
    int all = 0;
    for (int i = 0; i < 64; ++i) all += d[i];
    if (threadIdx.x == 0) taken[blockIdx.x].multiplying = cycles, taken[blockIdx.x].multiplications = round * CHAINED;
    if (all == 12345) taken[BLOCKS].issuing = all;  // nobody reads it, but it is computed
  } else {
    float t[64];
    int s[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) t[i] = i * 0.5f, s[i] = shared[threadIdx.x + i * 7] & 0xFFFF;
    const float factor = 1.0f + threadIdx.x * 1e-6f, summand = 0.5f + threadIdx.x * 1e-5f;
    const long long begin = clock64();
    for (int r = 0; issues && r < rounds; ++r) arithmetic<KIND>(t, s, factor, summand);
    const long long cycles = clock64() - begin;
    float all = 0;
#pragma unroll
    for (int i = 0; i < 64; ++i) all += t[i] + s[i];
    if (all == 1.2345f) taken[BLOCKS].issuing = 1;
    named_barrier_sync(5, 128);
    if (threadIdx.x == 128) done = 1, taken[blockIdx.x].issuing = cycles;
  }
#endif
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: this needs an H100 or H200\n", cudaGetErrorString(error));
  std::exit(1);
}

template <int KIND>
Taken taken_by(Taken* taken, int rounds, bool multiplies, bool issues) {
  Taken first;
  check(cudaFuncSetAttribute(both<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
  for (int warm = 0; warm < 2; ++warm) both<KIND><<<BLOCKS, 256, SHARED_BYTES>>>(taken, rounds, multiplies, issues);
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(&first, taken, sizeof first, cudaMemcpyDeviceToHost));
  return first;
}

template <int KIND = 0>
void report(Taken* taken) {
  constexpr int ROUNDS = 2000;
  const Taken multiplying = taken_by<KIND>(taken, ROUNDS, true, false);
  const Taken issuing = taken_by<KIND>(taken, ROUNDS, false, true);
  const Taken together = taken_by<KIND>(taken, ROUNDS, true, true);
  const auto a_multiplication = [](const Taken& t) { return double(t.multiplying) / t.multiplications; };
  const auto an_instruction = [](const Taken& t) { return double(t.issuing) / ROUNDS / 64; };
  std::printf("%-14s alone %.1f cycles a multiplication, %.2f an instruction; together %.1f and %.2f\n", NAMES[KIND],
              a_multiplication(multiplying), an_instruction(issuing), a_multiplication(together),
              an_instruction(together));
  if constexpr (KIND + 1 < KINDS) report<KIND + 1>(taken);
}

int main() {
  Taken* taken = nullptr;
  check(cudaMalloc(&taken, (BLOCKS + 1) * sizeof *taken));
  report(taken);
}
