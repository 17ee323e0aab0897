// probes/block_order.cu: sets the order in which the hardware assigns blocks of later kernels to SMs.
//   order_blocks   two consecutive blocks per SM; in both waves the SMs finish in the order of rank[SM]
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
