// fp16_few.cu: Y[M,N] = X[M,K] . W[N,K]^T in FP16, FP32 sums, for M of a few tokens.
//   w     half [N, STRIDE], row-major       x     half [>= M, STRIDE], row-major
//   bias  half [N] or null                  y     half [M, N], row-major
// STRIDE is K rounded up to a multiple of 8; x is zero past K, and w is finite there.
//
// A block has ROW_TILES * 16 rows of W, the A operand of mma.m16n8k16; COL_TILES tiles of 8 tokens are the
// columns. Its warps take steps of 128 k in turn and meet once, in a fixed order. A sum over k may be taken
// in any order: lane l has, of each 32 neighbouring k, the eight from 8·(l%4), of rows l/4 and l/4 + 8 and
// of token l/4, so every load is 16 bytes.
//
// Each lane has a cp.async ring of its own in shared memory, which only it writes and reads: no barrier, and
// no bank conflict. STAGES - 1 steps of a warp are requested before the previous kernel has ended. LATE: the
// next kernel may start when this one's blocks have requested their last weights, and takes no share of the
// bandwidth before.
#include "ptx.cuh"

#if !defined(ROW_TILES) || !defined(COL_TILES) || !defined(WARPS) || !defined(STAGES) || !defined(LATE)
#error "ROW_TILES, COL_TILES, WARPS, STAGES and LATE choose the kernel"
#endif
constexpr int MMA_ROWS = 16, MMA_TOKENS = 8, STEP_K = 128;
constexpr int CHUNKS = STEP_K / 32;  // of 32 k in a step; two MMAs each
constexpr int ROWS = ROW_TILES * MMA_ROWS;
constexpr int SHARES = ROW_TILES * COL_TILES * 32;
constexpr int TILE_BYTES = MMA_ROWS * STEP_K * 2, STAGE_BYTES = ROW_TILES * TILE_BYTES;
static_assert(STAGES >= 2, "one stage is computed while the others load");

struct Operands {
  const half_bits* w;
  const half_bits* x;
  int m, n, stride, first_row, first_token, lane;
};

// 16 bytes, evicted from L2 first, which fetches the 256 bytes around them: a row's share of a step.
__device__ inline void copy_weight(uint32_t shared, const half_bits* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "l"(policy));
}

__device__ inline void load_stage(const Operands& op, uint32_t stage, int step, uint64_t policy) {
#pragma unroll
  for (int r = 0; r < 2 * ROW_TILES; ++r) {
    // Past the edges: what is read again is multiplied by zeros, or never stored.
    const int row = min(op.first_row + op.lane / 4 + 8 * r, op.n - 1);
    const half_bits* from = op.w + static_cast<long long>(row) * op.stride;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int k = min(step * STEP_K + 32 * c + 8 * (op.lane % 4), op.stride - 8);
      copy_weight(stage + (r * CHUNKS + c) * 512, from + k, policy);
    }
  }
}

struct Tokens {
  uint4 of[COL_TILES][CHUNKS];
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
      x.of[j][c] = inside ? load_written(reinterpret_cast<const uint4*>(at)) : make_uint4(0, 0, 0, 0);
    }
}

// grid: (N / (16 * ROW_TILES), M / (8 * COL_TILES)), both rounded up.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
fp16_few(const half_bits* w, const half_bits* x, const half_bits* bias, half_bits* y, int m, int n, int k,
         int stride) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Operands op{w,
                    x,
                    m,
                    n,
                    stride,
                    static_cast<int>(blockIdx.x) * ROWS,
                    static_cast<int>(blockIdx.y) * COL_TILES * MMA_TOKENS,
                    lane};
  const int steps = (k + STEP_K - 1) / STEP_K;
  const uint64_t policy = evict_first_policy();
  const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES + lane * 16;
  if constexpr (!LATE) let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    const int step = warp + s * WARPS;
    if (step < steps) load_stage(op, ring + s * STAGE_BYTES, step, policy);
    cp_async_commit();
  }
  wait_for_previous_kernel();  // weights are constant; activations may be what it just wrote

  float sums[ROW_TILES][COL_TILES][4] = {};
  Tokens next;
  if (warp < steps) load_tokens(next, op, warp);
  int slot = 0;
  for (int step = warp; step < steps; step += WARPS) {
    const Tokens now = next;
    cp_async_wait<STAGES - 2>();
    const int ahead = step + (STAGES - 1) * WARPS;
    const int ahead_slot = slot == 0 ? STAGES - 1 : slot - 1;
    if (ahead < steps) load_stage(op, ring + ahead_slot * STAGE_BYTES, ahead, policy);
    else if constexpr (LATE) let_next_kernel_start();
    cp_async_commit();
    if (step + WARPS < steps) load_tokens(next, op, step + WARPS);
    const uint32_t stage = ring + slot * STAGE_BYTES;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const uint4 top = load_shared(stage + (2 * r * CHUNKS + c) * 512);
        const uint4 bottom = load_shared(stage + ((2 * r + 1) * CHUNKS + c) * 512);
        const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y};
        const uint32_t second[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j) {
          const uint32_t low[2] = {now.of[j][c].x, now.of[j][c].y};
          const uint32_t high[2] = {now.of[j][c].z, now.of[j][c].w};
          mma_f16_m16n8k16(sums[r][j], first, low);
          mma_f16_m16n8k16(sums[r][j], second, high);
        }
      }
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }

  cp_async_wait<0>();
  __syncthreads();
  float4* met = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j)
      met[warp * SHARES + (r * COL_TILES + j) * 32 + lane] =
          make_float4(sums[r][j][0], sums[r][j][1], sums[r][j][2], sums[r][j][3]);
  __syncthreads();
  for (int share = threadIdx.x; share < SHARES; share += WARPS * 32) {
    float4 sum = {};
#pragma unroll
    for (int from = 0; from < WARPS; ++from) {
      const float4 part = met[from * SHARES + share];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    const float of_share[4] = {sum.x, sum.y, sum.z, sum.w};
    const int of_lane = share % 32, j = share / 32 % COL_TILES, r = share / 32 / COL_TILES;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = op.first_token + j * MMA_TOKENS + of_lane % 4 * 2 + i % 2;
      const int feature = op.first_row + r * MMA_ROWS + of_lane / 4 + i / 2 * 8;
      if (token < m && feature < n) {
        const float b = bias == nullptr ? 0.0f : half_to_float(bias[feature]);
        y[static_cast<long long>(token) * n + feature] = float_to_half(of_share[i] + b);
      }
    }
  }
}
