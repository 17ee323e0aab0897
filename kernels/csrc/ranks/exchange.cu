// ranks/exchange.cu: the sum, or the largest values, of one vector per rank, on every rank, in one launch.
//   x        half2 [pairs], this rank's vector; replaced by the result
//   inboxes  uint64* [RANKS]: inbox of each rank, in its own memory, uint64 [2, RANKS, room], zeros at first
//   counts   uint32 [blocks], launches of each block so far; every rank makes the same launches
// A word of an inbox is a pair and the number of its launch. It is written at once, so that whoever waits for the
// number has the pair too, without a fence. Launches of a block alternate between two halves of the inboxes: a rank
// whose words of launch e - 1 are there has ended launch e - 2, so its half may be written again.
// FP16 sums are in FP32, in the order of ranks, and rounded once: they are equal on all ranks.
#include "ptx/launch.cuh"
#include "ptx/types.cuh"

constexpr int THREADS = 256;

__device__ inline void send(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ inline uint32_t receive(const uint64_t* from, uint32_t number) {
  uint64_t word;
  do {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  } while (static_cast<uint32_t>(word >> 32) != number);
  return static_cast<uint32_t>(word);
}

__device__ inline float joined(float a, half_bits b) {
  const float value = half_to_float(b);
#if LARGEST
  // NaN of either stays
  return a != a || a > value ? a : value;
#else
  return a + value;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
rank_exchange(uint32_t* x, uint64_t* const* inboxes, uint32_t* counts, int pairs, int rank, int room) {
  let_next_kernel_start();
  uint64_t* inbox[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; ++r) inbox[r] = inboxes[r];
  const uint64_t* own_inbox = inboxes[rank];
  wait_for_previous_kernel();
  const uint32_t number = counts[blockIdx.x] + 1;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < pairs) {
    const uint32_t own = x[i];
    const long long half = static_cast<long long>(number & 1) * RANKS * room + i;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != rank) send(inbox[r] + half + static_cast<long long>(rank) * room, uint64_t(number) << 32 | own);
    uint32_t pair[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      pair[r] = r == rank ? own : receive(own_inbox + half + static_cast<long long>(r) * room, number);
    float low = half_to_float(pair[0]), high = half_to_float(pair[0] >> 16);
#pragma unroll
    for (int r = 1; r < RANKS; ++r) {
      low = joined(low, pair[r]);
      high = joined(high, pair[r] >> 16);
    }
    x[i] = float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
  }
  __syncthreads();  // all have read the count
  if (threadIdx.x == 0) counts[blockIdx.x] = number;
}
