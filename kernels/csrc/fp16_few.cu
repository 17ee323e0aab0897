// fp16_few.cu: Y[M,N] = X[M,K] . W[N,K]^T in FP16, FP32 sums, for M of a few tokens.
//   w     half [N, STRIDE], row-major       x     half [>= M, STRIDE], row-major
//   bias  half [N] or null                  y     half [M, N], row-major
// STRIDE is K rounded up to a multiple of 8; x is zero past K, and w is finite there.
//
// A block has 16 rows of W, the A operand of mma.m16n8k16; COL_TILES tiles of 8 tokens are the columns.
// Its warps take steps of 128 k in turn and meet once, in a fixed order. A sum over k may be taken in any
// order: lane l has, of each 32 neighbouring k, the eight from 8·(l%4), of rows l/4 and l/4 + 8 and of token
// l/4, so every load is 16 bytes, and nothing but sums goes through shared memory.
//
// Two steps of weights wait in registers, the first two requested before the previous kernel has ended.
#include "ptx.cuh"

#if !defined(COL_TILES) || !defined(WARPS) || !defined(WIDE_FETCH)
#error "COL_TILES, WARPS and WIDE_FETCH choose the kernel"
#endif
constexpr int MMA_ROWS = 16, MMA_TOKENS = 8, STEP_K = 128;
constexpr int CHUNKS = STEP_K / 32;  // of 32 k in a step; two MMAs each
constexpr int SHARES = COL_TILES * 32;

// 16 bytes past L1, evicted from L2 first. WIDE_FETCH: L2 fetches the 256 bytes around them, which are
// a row's share of a step.
__device__ inline uint4 load_weight(const uint4* global, uint64_t policy) {
  if constexpr (!WIDE_FETCH) return load_once(global, policy);
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy));
  return v;
}

struct Operands {
  const half_bits* w;
  const half_bits* x;
  int m, n, stride, first_row, first_token, lane;
};

struct Weights {
  uint4 rows[CHUNKS][2];  // of l/4 and of l/4 + 8
};

__device__ inline void load_weights(Weights& out, const Operands& op, int step, uint64_t policy) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Past the edges: what is read again is multiplied by zeros, or never stored.
      const int row = min(op.first_row + op.lane / 4 + 8 * half, op.n - 1);
      const int k = min(step * STEP_K + 32 * c + 8 * (op.lane % 4), op.stride - 8);
      const half_bits* at = op.w + static_cast<long long>(row) * op.stride + k;
      out.rows[c][half] = load_weight(reinterpret_cast<const uint4*>(at), policy);
    }
}

__device__ inline void multiply(float (&sums)[COL_TILES][4], const Weights& weights, const Operands& op,
                                int step) {
  uint4 x[COL_TILES][CHUNKS];
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int token = op.first_token + j * MMA_TOKENS + op.lane / 4;
      const int k = step * STEP_K + 32 * c + 8 * (op.lane % 4);
      const half_bits* at = op.x + static_cast<long long>(token) * op.stride + k;
      const bool inside = token < op.m && k < op.stride;
      x[j][c] = inside ? load_written(reinterpret_cast<const uint4*>(at)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const uint4 top = weights.rows[c][0], bottom = weights.rows[c][1];
    const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y};
    const uint32_t second[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
      const uint32_t low[2] = {x[j][c].x, x[j][c].y}, high[2] = {x[j][c].z, x[j][c].w};
      mma_f16_m16n8k16(sums[j], first, low);
      mma_f16_m16n8k16(sums[j], second, high);
    }
  }
}

// grid: (N/16, M / (8 * COL_TILES)), both rounded up.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
fp16_few(const half_bits* w, const half_bits* x, const half_bits* bias, half_bits* y, int m, int n, int k,
         int stride) {
  __shared__ float4 met[WARPS][SHARES];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Operands op{w,
                    x,
                    m,
                    n,
                    stride,
                    static_cast<int>(blockIdx.x) * MMA_ROWS,
                    static_cast<int>(blockIdx.y) * COL_TILES * MMA_TOKENS,
                    lane};
  const int steps = (k + STEP_K - 1) / STEP_K;
  const uint64_t policy = evict_first_policy();
  let_next_kernel_start();
  Weights even, odd;
  if (warp < steps) load_weights(even, op, warp, policy);
  if (warp + WARPS < steps) load_weights(odd, op, warp + WARPS, policy);
  wait_for_previous_kernel();  // weights are constant; activations may be what it just wrote

  float sums[COL_TILES][4] = {};
  for (int step = warp; step < steps; step += 2 * WARPS) {
    multiply(sums, even, op, step);
    if (step + 2 * WARPS < steps) load_weights(even, op, step + 2 * WARPS, policy);
    if (step + WARPS < steps) multiply(sums, odd, op, step + WARPS);
    if (step + 3 * WARPS < steps) load_weights(odd, op, step + 3 * WARPS, policy);
  }
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
    met[warp][j * 32 + lane] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
  __syncthreads();
  for (int share = threadIdx.x; share < SHARES; share += WARPS * 32) {
    float4 sum = {};
#pragma unroll
    for (int from = 0; from < WARPS; ++from) {
      const float4 part = met[from][share];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    const float of_share[4] = {sum.x, sum.y, sum.z, sum.w};
    const int of_lane = share % 32, j = share / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = op.first_token + j * MMA_TOKENS + of_lane % 4 * 2 + i % 2;
      const int feature = op.first_row + of_lane / 4 + i / 2 * 8;
      if (token < m && feature < n) {
        const float b = bias == nullptr ? 0.0f : half_to_float(bias[feature]);
        y[static_cast<long long>(token) * n + feature] = float_to_half(of_share[i] + b);
      }
    }
  }
}
