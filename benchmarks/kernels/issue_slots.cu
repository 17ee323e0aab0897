// What a Hopper SM does beside int8 warpgroup MMA. Needs nvcc 12 or later and an H100 or H200:
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a benchmarks/kernels/issue_slots.cu && ./a.out
//
// One warpgroup of a block multiplies 64x128x32, eight in a chain, until another one has issued its
// instructions, all of one kind in as many chains of dependence as said. Cycles that each takes alone and both
// take together. docs/kernels/flexq-imma.md says what follows.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

constexpr int BLOCKS = 132, SHARED_BYTES = 128 * 1024, TOKENS_AT = 64 * 1024, CHAINED = 8;

// d[64,128] += a[64,32] . b[32,128], int8; a in the registers of four warps, b at a descriptor.
__device__ __forceinline__ void multiply(int (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, p;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]),
        "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
        "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]),
        "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]),
        "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
        "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
        "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
        "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]),
        "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
        "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]),
        "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]),
        "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]),
        "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Operand whose rows are 128 bytes along k in the 128-byte swizzle (PTX ISA, matrix descriptor).
__device__ __forceinline__ uint64_t descriptor(uint32_t shared) {
  return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((shared & 0x3FFFF) >> 4);
}

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
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
    const uint32_t tokens = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + TOKENS_AT;
    const uint32_t a[4] = {shared[threadIdx.x], shared[threadIdx.x + 128], shared[threadIdx.x + 256],
                           shared[threadIdx.x + 384]};
    int d[64] = {}, round = 0;
    const long long begin = clock64();
    while (multiplies && (issues || round < rounds)) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < CHAINED; ++i) multiply(d, a, descriptor(tokens + i % 4 * 32));
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 64; ++i) asm volatile("" : "+r"(d[i])::"memory");
      ++round;
      if (issues && round % 4 == 0) {  // all warps learn of the end in the same round
        if (threadIdx.x == 0) seen = done;
        asm volatile("bar.sync 4, 128;" ::: "memory");
        if (seen) break;
        asm volatile("bar.sync 4, 128;" ::: "memory");
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
    asm volatile("bar.sync 5, 128;" ::: "memory");
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
