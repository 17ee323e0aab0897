// fp16/few_tokens.cu: Y[M,N] = X[M,K] . W[N,K]^T in FP16, FP32 sums, for few tokens.
//   w     half [N, STRIDE], row-major       x     half [>= M, STRIDE], row-major
//   bias  half [N] or null                  y     half [M, N], row-major
// STRIDE is K rounded up to a multiple of 8; x is zero past K, and w is finite there.
//
// Rows are grouped in octets, half of the A operand of mma.m16n8k16, so that rows divide evenly over blocks:
// tiles of 16 rows are too coarse for few rows and many SMs. A block processes OCTETS octets at once; the
// columns are COL_TILES tiles of 8 tokens. Its warps take the steps of STEP_K k round-robin; partial sums are
// reduced once per OCTETS octets, in a fixed order. k is permuted, which does not change sums: of each 32 adjacent
// k, lane l has the eight from 8·(l%4), of row l/4 of each octet and of token l/4, so every load is 16 bytes.
//
// Each lane has its own cp.async ring buffer in shared memory, so there are no barriers and no bank conflicts.
// It is filled before the previous kernel has ended, and a stage is refilled as soon as it has been multiplied.
// LATE: the next kernel may start only when all blocks have issued their last loads of weights, so that it does
// not compete for bandwidth earlier. PERSISTENT: a block may process several sets of OCTETS octets without
// draining its ring buffers; sums then do not alias the ring buffers.
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

#if !defined(OCTETS) || !defined(COL_TILES) || !defined(WARPS) || !defined(STAGES) || !defined(STEP_K) || \
    !defined(LATE) || !defined(PERSISTENT)
#error "define OCTETS, COL_TILES, WARPS, STAGES, STEP_K, LATE and PERSISTENT"
#endif
static_assert(STAGES >= 2, "STAGES must be at least 2: one is multiplied while the others load");
constexpr int MMA_TOKENS = 8, OCTET = 8;
constexpr int CHUNKS = STEP_K / 32;  // of 32 k in a step; two MMAs each
constexpr int CHUNK_BYTES = OCTET * 32 * 2, OCTET_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int STAGE_BYTES = OCTETS * OCTET_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
constexpr int TILES = (OCTETS + 1) / 2;          // of 16 rows; the last may be half empty
constexpr int SHARES = OCTETS * COL_TILES * 32;  // pairs of sums: two tokens of a row

struct Operands {
  const half_bits* w;
  const half_bits* x;
  int m, n, stride, first_token, lane;
};

// Copy 16 bytes, evict-first in L2, with a prefetch of 256 bytes to L2.
__device__ inline void copy_weight(uint32_t shared, const half_bits* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "l"(policy));
}

// A warp's next step of K and its first octet. The last step is followed by the first one of the next OCTETS.
struct Position {
  int octet, step;

  __device__ inline void wrap(int steps) {
    while (step >= steps) step -= steps, octet += OCTETS;
  }

  __device__ inline void next(int steps) {
    step += WARPS;
    wrap(steps);
  }
};

__device__ inline void load_stage(const Operands& op, uint32_t stage, Position position, int end, uint64_t policy) {
#pragma unroll
  for (int o = 0; o < OCTETS; ++o) {
    if (position.octet + o >= end) break;
    // Clamped at the edges: such weights are multiplied by zeros, or their outputs are not stored.
    const int row = min((position.octet + o) * OCTET + op.lane / 4, op.n - 1);
    const half_bits* from = op.w + static_cast<long long>(row) * op.stride;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int k = min(position.step * STEP_K + 32 * c + 8 * (op.lane % 4), op.stride - 8);
      copy_weight(stage + o * OCTET_BYTES + c * CHUNK_BYTES, from + k, policy);
    }
  }
}

struct Tokens {
  uint4 vectors[COL_TILES][CHUNKS];
};

__device__ inline void load_tokens(Tokens& x, const Operands& op, int step) {
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int token = op.first_token + j * MMA_TOKENS + op.lane / 4;
      const int k = step * STEP_K + 32 * c + 8 * (op.lane % 4);
      const half_bits* at = op.x + static_cast<long long>(token) * op.stride + k;
      const bool inside = token < op.m && k < op.stride;
      x.vectors[j][c] = inside ? load_written(reinterpret_cast<const uint4*>(at)) : make_uint4(0, 0, 0, 0);
    }
}

using Sums = float[TILES][COL_TILES][4];

__device__ inline void multiply_stage(Sums& sums, uint32_t stage, const Tokens& x) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const uint32_t at = stage + 2 * t * OCTET_BYTES + c * CHUNK_BYTES;
      const uint4 top = load_shared(at);
      const uint4 bottom = 2 * t + 1 < OCTETS ? load_shared(at + OCTET_BYTES) : make_uint4(0, 0, 0, 0);
      const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y};
      const uint32_t second[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
        const uint32_t low[2] = {x.vectors[j][c].x, x.vectors[j][c].y};
        const uint32_t high[2] = {x.vectors[j][c].z, x.vectors[j][c].w};
        mma_f16_m16n8k16(sums[t][j], first, low);
        mma_f16_m16n8k16(sums[t][j], second, high);
      }
    }
}

// grid: (blocks, M / (8 * COL_TILES)), blocks at most N / 8, and N / (8 * OCTETS) where not PERSISTENT; all
// rounded up.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
fp16_few(const half_bits* w, const half_bits* x, const half_bits* bias, half_bits* y, int m, int n, int k,
         int stride) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int steps = (k + STEP_K - 1) / STEP_K;
  const Operands op{w, x, m, n, stride, static_cast<int>(blockIdx.y) * COL_TILES * MMA_TOKENS, lane};
  const long long octets = (n + OCTET - 1) / OCTET;
  const int begin = static_cast<int>(octets * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(octets * (blockIdx.x + 1) / gridDim.x);
  const uint64_t policy = evict_first_policy();
  const uint32_t ring = shared_address(shared) + warp * RING_BYTES + lane * 16;
  if constexpr (!LATE) let_next_kernel_start();
  Position load{begin, warp};
  load.wrap(steps);
  Position position = load;
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (load.octet < end) load_stage(op, ring + s * STAGE_BYTES, load, end, policy);
    load.next(steps);
    cp_async_commit();
  }
  wait_for_previous_kernel();  // weights are constant, activations may be its output

  Tokens next;
  if (position.octet < end) load_tokens(next, op, position.step);
  int slot = 0;
  [[maybe_unused]] int parity = 0;
  for (int octet = begin; octet < end; octet += OCTETS) {
    Sums sums = {};
    while (position.octet == octet) {
      const Tokens now = next;
      position.next(steps);
      if (position.octet < end) load_tokens(next, op, position.step);
      cp_async_wait<STAGES - 1>();
      const uint32_t stage = ring + slot * STAGE_BYTES;
      multiply_stage(sums, stage, now);
      if (load.octet < end) load_stage(op, stage, load, end, policy);
      else if constexpr (LATE) let_next_kernel_start();
      load.next(steps);
      cp_async_commit();
      slot = slot == STAGES - 1 ? 0 : slot + 1;
    }

    float2* partial_sums = reinterpret_cast<float2*>(shared);
    if constexpr (PERSISTENT) {
      // Double-buffered: other warps may still read the sums of the previous reduction, but no earlier ones.
      partial_sums += WARPS * RING_BYTES / sizeof(float2) + parity * WARPS * SHARES;
      parity ^= 1;
    } else {
      cp_async_wait<0>();
      __syncthreads();
    }
#pragma unroll
    for (int o = 0; o < OCTETS; ++o)
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
        const float(&s)[4] = sums[o / 2][j];
        partial_sums[warp * SHARES + (o * COL_TILES + j) * 32 + lane] =
            make_float2(s[o % 2 * 2], s[o % 2 * 2 + 1]);
      }
    __syncthreads();
    for (int share = threadIdx.x; share < SHARES; share += WARPS * 32) {
      float sum[2] = {};
#pragma unroll
      for (int from = 0; from < WARPS; ++from) {
        const float2 part = partial_sums[from * SHARES + share];
        sum[0] += part.x, sum[1] += part.y;
      }
      const int fragment_lane = share % 32, j = share / 32 % COL_TILES, o = octet + share / 32 / COL_TILES;
      const int feature = o * OCTET + fragment_lane / 4;
      if (o >= end || feature >= n) continue;
      const float b = bias == nullptr ? 0.0f : half_to_float(bias[feature]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = op.first_token + j * MMA_TOKENS + fragment_lane % 4 * 2 + i;
        if (token < m) y[static_cast<long long>(token) * n + feature] = float_to_half(sum[i] + b);
      }
    }
  }
}
