// How much arithmetic a Hopper SM does beside int8 warpgroup MMA. Needs nvcc and an H100 or H200:
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I kernels/csrc benchmarks/kernels/issue_slots.cu
//   ./a.out
// One warpgroup of a block multiplies 64x128x32, chained as over K, another one issues one kind of instruction
// in 32 independent chains. For each kind: cycles a multiplication and an instruction take alone, and of the
// shorter one's time how much the other's hid when both ran; 0 %: they took turns.
#include <cstdio>

#include "ptx.cuh"

constexpr int CHAINED = 8, CHAINS = 32, TOKENS = 128, BLOCKS = 132;
enum Kind { FFMA, FMUL, I2F, LOP3, DFMA, KINDS };
constexpr const char* NAMES[KINDS] = {"FFMA", "FMUL", "I2F", "LOP3", "DFMA"};

// What was computed, so that it is: nobody reads it.
__device__ void keep(long long* unread, long long value) {
  if (value == 0x123456789ABCDEF) *unread = value;
}

template <int KIND>
__device__ long long instructions(int rounds, unsigned seed) {
  uint32_t words[CHAINS];
  double doubles[CHAINS];
  for (int i = 0; i < CHAINS; ++i) words[i] = 0x3F800000u + i * seed, doubles[i] = 1.0 + i * seed;
  for (int r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) {
      const int other = (i + 1) % CHAINS;
      if constexpr (KIND == FFMA) asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+r"(words[i]) : "r"(words[other]), "r"(seed));
      if constexpr (KIND == FMUL) asm volatile("mul.rn.f32 %0, %0, %1;" : "+r"(words[i]) : "r"(seed));
      if constexpr (KIND == I2F) asm volatile("{.reg .f32 f;\ncvt.rn.f32.s32 f, %0;\nmov.b32 %0, f;}" : "+r"(words[i]));
      if constexpr (KIND == LOP3) asm volatile("lop3.b32 %0, %0, %1, %2, 0x6A;" : "+r"(words[i]) : "r"(words[other]), "r"(seed));
      if constexpr (KIND == DFMA) asm volatile("fma.rn.f64 %0, %0, %1, %1;" : "+d"(doubles[i]) : "d"(doubles[other]));
    }
  long long all = 0;
  for (int i = 0; i < CHAINS; ++i) all += words[i] + __double_as_longlong(doubles[i]);
  return all;
}

template <int KIND>
__global__ void __launch_bounds__(256, 1) both(long long* cycles, int multiplications, int rounds) {
  __shared__ __align__(1024) unsigned char tokens[TOKENS * 128];
  for (int i = threadIdx.x; i < TOKENS * 128; i += blockDim.x) tokens[i] = i * 37 % 63 - 31;
#if __CUDA_ARCH__ == 900
  fence_async_proxy();
  __syncthreads();
  const long long begin = clock64();
  if (threadIdx.x < 128) {
    int sums[TOKENS / 2] = {};
    uint32_t a[4] = {threadIdx.x * 0x01030507u, threadIdx.x * 0x05070301u, threadIdx.x, threadIdx.x * 0x11u};
    const uint64_t b = swizzled_operand(shared_address(tokens));
    for (int m = 0; m < multiplications; m += CHAINED) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < CHAINED; ++i) wgmma_s8_k32(sums, a, further_along(b, i % 4 * 32), true);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+r"(sums[i])::"memory");
    }
    long long all = 0;
    for (int i = 0; i < TOKENS / 2; ++i) all += sums[i];
    keep(cycles + BLOCKS, all);
  } else {
    keep(cycles + BLOCKS, instructions<KIND>(rounds, threadIdx.x));
  }
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - begin;
#endif
}

template <int KIND>
long long cycles_of(long long* cycles, int multiplications, int rounds) {
  long long first = 0;
  for (int warm = 0; warm < 2; ++warm) both<KIND><<<BLOCKS, 256>>>(cycles, multiplications, rounds);
  cudaMemcpy(&first, cycles, sizeof first, cudaMemcpyDeviceToHost);
  return first;
}

template <int KIND = 0>
void report(long long* cycles) {
  constexpr int MULTIPLICATIONS = 4096;
  const long long multiplying = cycles_of<KIND>(cycles, MULTIPLICATIONS, 0);
  const long long probe = cycles_of<KIND>(cycles, 0, 1000);
  const int rounds = static_cast<int>(1000 * multiplying / probe);  // as long as the multiplications
  const long long arithmetic = cycles_of<KIND>(cycles, 0, rounds);
  const long long together = cycles_of<KIND>(cycles, MULTIPLICATIONS, rounds);
  const double hidden = double(multiplying + arithmetic - together) / arithmetic;
  std::printf("%s: %.1f cycles a multiplication, %.2f an instruction, %.0f %% hidden\n", NAMES[KIND],
              double(multiplying) / MULTIPLICATIONS, double(arithmetic) / rounds / CHAINS, 100 * hidden);
  if constexpr (KIND + 1 < KINDS) report<KIND + 1>(cycles);
}

int main() {
  long long* cycles = nullptr;
  cudaMalloc(&cycles, (BLOCKS + 1) * sizeof *cycles);
  report(cycles);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) std::printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
