// btc/gemm.cu: Y[M,N] = X[M,K] . W[N,K]^T on binary tensor cores, 6-bit weights (FlexQ).
//   w   uint32 [K/128, N/16, W_BITS, 16, 4]  bit planes, lowest first; 32 values of k in a word
//   sw  half   [K/128, N/16 * 16]            scale of a group of weights
//   x   uint32 [K/128, COLS, 4]              column m*A_BITS + t is bit plane t of token m
//   sx  float  [K/128, M]                    scale of a group of activations (an FP16 value)
//   bias half  [N] or null                   y  half [M, N], row-major
// K/128 and N/16 are rounded up, COLS = M*A_BITS rounded up to 8; padding is zero.
//
// Weights are the 16 rows of m16n8k128, activation bit planes its 8 columns: M = 1 with 8-bit
// activations uses all columns. The planes of W are summed by Horner's rule from the top: the sum over a
// group is one exact integer, converted and scaled once. The 2^t of the activation planes is applied after
// the K loop.
//
// A block computes 16*ROW_TILES rows; its warps split K, each with its own cp.async pipeline.
// Partial sums are reduced once, in shared memory, in a fixed order: results are deterministic.
//
// Compile-time switches disable optimizations for the ablation (FlexQ, Table 6):
//   STAGES = 1         no pipeline: a warp waits for the copies that it has just issued
//   WARP_REDUCTION = 0 the planes of W are reduced in shared memory, not in the registers of the warp
//   EVICT_FIRST = 0    weights are loaded without a cache hint
//   DEQUANT = 0        no scale is read or applied: y is int [M, N], the integer sums over all of K
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

#if !defined(A_BITS) || !defined(TOKENS) || !defined(ROW_TILES) || !defined(WARPS) || !defined(STAGES)
#error "define A_BITS, TOKENS, ROW_TILES, WARPS and STAGES"
#endif
#ifndef WARP_REDUCTION
#define WARP_REDUCTION 1
#endif
#ifndef EVICT_FIRST
#define EVICT_FIRST 1
#endif
#ifndef DEQUANT
#define DEQUANT 1
#endif
#if DEQUANT
using sum_t = float;
using out_t = half_bits;
#else
using sum_t = int;
using out_t = int;
#endif
constexpr int W_BITS = 6, GROUP = 128;      // GROUP: values of k that share one scale
constexpr int MMA_ROWS = 16, MMA_COLS = 8;  // PTX mma.m16n8k128, b1
constexpr int COL_TILES = (TOKENS * A_BITS + MMA_COLS - 1) / MMA_COLS;
constexpr int PAIRS = A_BITS / 2;           // a thread holds two adjacent planes of one token
constexpr int TILE_CHUNKS = W_BITS * MMA_ROWS;                   // 16-byte chunks of one weight tile
constexpr int SCALE_CHUNKS = MMA_ROWS * 2 / 16;                  // 16-byte chunks of its scales
constexpr int STAGE_CHUNKS = ROW_TILES * (TILE_CHUNKS + SCALE_CHUNKS);
constexpr int ROWS = ROW_TILES * MMA_ROWS;
constexpr int RED_STRIDE = COL_TILES * 4 + 1;                    // + 1: avoids bank conflicts between rows
static_assert(A_BITS % 2 == 0, "A_BITS must be even: the two planes of a thread belong to one token");
static_assert(GROUP == 128, "GROUP must be the k of one MMA: its result is rescaled");
static_assert(TILE_CHUNKS % 32 == 0, "TILE_CHUNKS must be a multiple of 32: lanes copy equally many chunks");

// Dynamic shared memory: the warps' pipeline stages, reused for the reduction; then the warps' scratch.
constexpr int PIPELINE_BYTES = WARPS * STAGES * STAGE_CHUNKS * 16;
constexpr int REDUCTION_BYTES = WARPS * ROWS * RED_STRIDE * 4;
constexpr int SCRATCH_AT = PIPELINE_BYTES > REDUCTION_BYTES ? PIPELINE_BYTES : REDUCTION_BYTES;
constexpr int SCRATCH_INTS = WARP_REDUCTION ? 0 : W_BITS * MMA_ROWS * MMA_COLS;  // of one warp

struct Operands {
  const uint4* w;
  const half_bits* sw;
  const uint32_t* x;
  const float* sx;
  int m, n, row_tiles, col_tiles;
};

__device__ inline void copy_weights(uint32_t to, const uint4* from, uint64_t policy) {
#if EVICT_FIRST
  cp_async_16(to, from, policy);
#else
  cp_async_16(to, from);
#endif
}

__device__ inline void load_stage(const Operands& op, uint32_t stage, int step, int lane,
                                  uint64_t policy) {
  const int first_tile = blockIdx.x * ROW_TILES;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    const int tile = min(first_tile + r, op.row_tiles - 1);  // past the end: loaded, never stored
    const long long at = static_cast<long long>(step) * op.row_tiles + tile;
    const uint32_t shared = stage + r * (TILE_CHUNKS + SCALE_CHUNKS) * 16;
    const uint4* planes = op.w + at * TILE_CHUNKS;
#pragma unroll
    for (int i = 0; i < TILE_CHUNKS / 32; ++i)
      copy_weights(shared + (i * 32 + lane) * 16, planes + i * 32 + lane, policy);
    if (DEQUANT && lane < SCALE_CHUNKS)
      cp_async_16(shared + (TILE_CHUNKS + lane) * 16,
                  reinterpret_cast<const uint4*>(op.sw + at * MMA_ROWS) + lane);
  }
}

// This lane's activation planes and scales of one step.
struct Activations {
  uint32_t planes[COL_TILES];
  float scale[COL_TILES];
};

__device__ inline void load_activations(Activations& a, const Operands& op, int step, int lane) {
  const int first = blockIdx.y * TOKENS * A_BITS / MMA_COLS;
  const uint32_t* x = op.x + (static_cast<long long>(step) * op.col_tiles + first) * MMA_COLS * 4;
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j) {
    const int token = blockIdx.y * TOKENS + (j * 4 + lane % 4) / PAIRS;
    a.planes[j] = first + j < op.col_tiles ? load_written(x + j * MMA_COLS * 4 + lane) : 0u;
    a.scale[j] = DEQUANT && token < op.m ? load_written(op.sx + static_cast<long long>(step) * op.m + token) : 0.0f;
  }
}

// Sums over the k of a group: weights [16, 128], all planes, times one tile of activation planes.
// c is an accumulator fragment of mma.m16n8k128.
__device__ inline void sum_planes(int (&c)[4], const uint32_t (&planes)[W_BITS][2], uint32_t x,
                                  [[maybe_unused]] int* scratch, [[maybe_unused]] int lane) {
#if WARP_REDUCTION
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = 0;
  mma_b1_m16n8k128(c, planes[W_BITS - 1], x);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = -c[i];  // the top plane is the sign
#pragma unroll
  for (int s = W_BITS - 2; s >= 0; --s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += c[i];
    mma_b1_m16n8k128(c, planes[s], x);
  }
#else
  int2* top = reinterpret_cast<int2*>(scratch) + lane;  // [plane][row][pair of columns]
  __syncwarp();
#pragma unroll
  for (int s = 0; s < W_BITS; ++s) {
    int product[4] = {};
    mma_b1_m16n8k128(product, planes[s], x);
    top[s * 64] = make_int2(product[0], product[1]);
    top[s * 64 + 32] = make_int2(product[2], product[3]);
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int2 sum = make_int2(0, 0);
#pragma unroll
    for (int s = 0; s < W_BITS; ++s) {
      const int2 product = top[s * 64 + half * 32];
      const int weight = s == W_BITS - 1 ? -(1 << s) : 1 << s;  // the top plane is the sign
      sum.x += weight * product.x, sum.y += weight * product.y;
    }
    c[2 * half] = sum.x, c[2 * half + 1] = sum.y;
  }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
flexq_btc(const uint4* w, const half_bits* sw, const uint32_t* x, const float* sx,
          [[maybe_unused]] const half_bits* bias, out_t* y, int m, int n, int k) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int steps = (k + GROUP - 1) / GROUP;
  const Operands op{w, sw, x, sx, m, n, (n + MMA_ROWS - 1) / MMA_ROWS,
                    (m * A_BITS + MMA_COLS - 1) / MMA_COLS};
  const uint64_t policy = evict_first_policy();
  const uint32_t stages = shared_address(shared) + warp * STAGES * STAGE_CHUNKS * 16;
  const uint32_t* warp_stages =
      reinterpret_cast<const uint32_t*>(shared + warp * STAGES * STAGE_CHUNKS * 16);
  int* scratch = reinterpret_cast<int*>(shared + SCRATCH_AT) + warp * SCRATCH_INTS;

  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    const int step = warp + s * WARPS;
    if (step < steps) load_stage(op, stages + s * STAGE_CHUNKS * 16, step, lane, policy);
    cp_async_commit();
  }
  wait_for_previous_kernel();  // weights are constant, activations may be its output

  sum_t sum[ROW_TILES][COL_TILES][2] = {};
  Activations next;
  if (warp < steps) load_activations(next, op, warp, lane);
  int slot = 0;
  for (int step = warp; step < steps; step += WARPS) {
    const Activations now = next;
    if constexpr (STAGES > 1) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();  // all copies are complete, and no lane still reads the slot that is written below
      const int ahead = step + (STAGES - 1) * WARPS;
      const int ahead_slot = slot == 0 ? STAGES - 1 : slot - 1;
      if (ahead < steps) load_stage(op, stages + ahead_slot * STAGE_CHUNKS * 16, ahead, lane, policy);
      cp_async_commit();
    } else {
      __syncwarp();
      load_stage(op, stages, step, lane, policy);
      cp_async_commit();
      cp_async_wait<0>();
      __syncwarp();
    }
    if (step + WARPS < steps) load_activations(next, op, step + WARPS, lane);

    const uint32_t* stage = warp_stages + slot * STAGE_CHUNKS * 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const uint32_t* tile = stage + r * (TILE_CHUNKS + SCALE_CHUNKS) * 4;
      uint32_t planes[W_BITS][2];
#pragma unroll
      for (int s = 0; s < W_BITS; ++s) {
        planes[s][0] = tile[s * MMA_ROWS * 4 + lane];
        planes[s][1] = tile[s * MMA_ROWS * 4 + 32 + lane];
      }
      // Combine two adjacent activation planes; in the last pair the upper one is the sign.
      int pairs[COL_TILES][2];
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
        int c[4];
        sum_planes(c, planes, now.planes[j], scratch, lane);
        const int upper = (j * 4 + lane % 4) % PAIRS == PAIRS - 1 ? -2 : 2;
        pairs[j][0] = c[0] + upper * c[1];
        pairs[j][1] = c[2] + upper * c[3];
      }
#if DEQUANT
      const half_bits* scales = reinterpret_cast<const half_bits*>(tile + TILE_CHUNKS * 4);
      const float scale_top = half_to_float(scales[lane / 4]);
      const float scale_bottom = half_to_float(scales[lane / 4 + 8]);
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
        sum[r][j][0] += static_cast<float>(pairs[j][0]) * (scale_top * now.scale[j]);
        sum[r][j][1] += static_cast<float>(pairs[j][1]) * (scale_bottom * now.scale[j]);
      }
#else
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) sum[r][j][0] += pairs[j][0], sum[r][j][1] += pairs[j][1];
#endif
    }
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }
  cp_async_wait<0>();

  // Reduction over warps: [warp][row][pair of planes], then one thread per output.
  __syncthreads();
  sum_t* red = reinterpret_cast<sum_t*>(shared);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
      const int pair = j * 4 + lane % 4;
      const sum_t weight = static_cast<sum_t>(1 << (2 * (pair % PAIRS)));  // 4^(t/2)
      const int row = r * MMA_ROWS + lane / 4;
      red[(warp * ROWS + row) * RED_STRIDE + pair] = sum[r][j][0] * weight;
      red[(warp * ROWS + row + 8) * RED_STRIDE + pair] = sum[r][j][1] * weight;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * TOKENS; i += WARPS * 32) {
    const int row = i % ROWS, token = blockIdx.y * TOKENS + i / ROWS;
    const int feature = blockIdx.x * ROWS + row;
    sum_t total = 0;
#pragma unroll
    for (int from = 0; from < WARPS; ++from)
#pragma unroll
      for (int p = 0; p < PAIRS; ++p)
        total += red[(from * ROWS + row) * RED_STRIDE + i / ROWS * PAIRS + p];
    if (token < m && feature < n) {
#if DEQUANT
      if (bias != nullptr) total += half_to_float(bias[feature]);
      y[static_cast<long long>(token) * n + feature] = float_to_half(total);
#else
      y[static_cast<long long>(token) * n + feature] = total;
#endif
    }
  }
}
