// probes/block_order.cu: the order in which the hardware assigns blocks of later kernels to SMs.
//   order_blocks     two consecutive blocks per SM; in both waves the SMs finish in the order of rank[SM]
//   shuffle_blocks   consecutive blocks of random length on every SM, so that they finish in a random order
// The order is the one in which the blocks of the last kernel of several waves ended. It persists until the
// next such kernel, so a kernel whose blocks don't divide evenly over the SMs has several speeds.
#include "ptx/special_registers.cuh"

constexpr long long START_NS = 5'000;  // until every SM has its first block
constexpr long long STEP_NS = 200;     // between one SM and the next

// uint64_t state[1 + sms], initially zeros: the start time of the first block, and the number of blocks of each
// SM. A block uses enough shared memory that only one fits on an SM.
extern "C" __global__ void __launch_bounds__(32)
order_blocks(unsigned long long* state, const int* rank, int sms) {
  if (threadIdx.x != 0) return;
  const uint32_t sm = sm_number();
  if (sm >= static_cast<uint32_t>(sms)) return;
  const unsigned long long now = global_ns();
  const unsigned long long start = atomicCAS(state, 0ull, now);
  const long long wave = static_cast<long long>(atomicAdd(state + 1 + sm, 1ull));
  const long long length = START_NS + STEP_NS * sms;
  const long long end = static_cast<long long>(start ? start : now) + wave * length + START_NS + STEP_NS * rank[sm];
  while (global_ns() < end) {
  }
}

// Every block lasts up to longest_ns, uniformly drawn from the seed and its number. A block uses enough shared
// memory that only one fits on an SM.
extern "C" __global__ void __launch_bounds__(32)
shuffle_blocks(int seed, int longest_ns) {
  if (threadIdx.x != 0) return;
  unsigned bits = static_cast<unsigned>(seed) + blockIdx.x * 0x9e3779b9u;
  for (int round = 0; round < 2; ++round) {
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
  }
  const long long end = global_ns() + __umulhi(bits ^ bits >> 16, static_cast<unsigned>(longest_ns));
  while (global_ns() < end) {
  }
}
