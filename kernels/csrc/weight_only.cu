// weight_only.cu: Y[M,N] = X[M,K] . W[N,K]^T on FP16 tensor cores, weights of 8 or 4 bits, FP16 activations.
//   w     tiles [N/16, K/128] as below               x     half [M, X_STRIDE], X_STRIDE a multiple of 8
//   sw    W_BITS 8: half [N], one scale a row; W_BITS 4: half [N/16, K/128, 8, 2], one a row and 128 k,
//         those of rows r and r + 8 side by side
//   bias  half [N] or null                           y     half [M, N], row-major
// N/16 and K/128 are rounded up; weights past the edges are codes of zero, x past K is zero.
//
// A tile is 16 rows and 128 k: the A operands that a warp needs for eight mma.m16n8k16. Lane l holds rows
// l/4 and l/4 + 8 and, of each 32 neighbouring k, the eight from 8·(l%4): a sum over k may be taken in any
// order, and in this one four lanes read 64 neighbouring bytes of a token. MMA i takes the k from
// 32·(i/2) + 8·(l%4) + 4·(i%2); its operand register o holds row l/4 + 8·(o%2), the first two of these k
// where o < 2 and the last two otherwise.
//   W_BITS 8   uint4 [4][32 lanes]: bytes code + 128; word 2i + o/2 of a lane has register o of MMA i in its
//              bytes 2·(o%2) and 2·(o%2) + 1
//   W_BITS 4   uint4 [2][32 lanes]: nibbles code + 8; word i of a lane has register o of MMA i in its
//              nibbles o and o + 4
//
// Widening is exact: 0x6400 | u is the half 1024 + u, and one subtraction (or, for the upper nibbles, one
// fused multiply-add) leaves the code.
//
// K_SPLIT neighbouring blocks, a cluster, own ROW_TILES rows of tiles; their warps split K, each with a
// cp.async ring of its own, and meet once, in a fixed order: results are the same from run to run. Weights
// are constant, so they are requested before the previous kernel has ended.
#include "ptx.cuh"

#if !defined(W_BITS) || !defined(COL_TILES) || !defined(ROW_TILES) || !defined(WARPS) || \
    !defined(STAGES) || !defined(K_SPLIT)
#error "W_BITS, COL_TILES, ROW_TILES, WARPS, STAGES and K_SPLIT choose the kernel"
#endif
#include "k_split.cuh"
static_assert(W_BITS == 4 || W_BITS == 8, "4-bit weights in groups or 8-bit weights by row");
static_assert(STAGES >= 2, "one stage is computed while the others load");

constexpr int STEP_K = 128, MMA_ROWS = 16, MMA_TOKENS = 8, MMA_K = 16;
constexpr int MMAS = STEP_K / MMA_K;  // to cross a step
constexpr int TOKENS = COL_TILES * MMA_TOKENS;
constexpr int TILE_BYTES = MMA_ROWS * STEP_K * W_BITS / 8;
constexpr int STAGE_BYTES = ROW_TILES * TILE_BYTES;
constexpr int LANE_VECTORS = TILE_BYTES / 512;
constexpr int X_VECTORS = STEP_K / 32;  // 16-byte loads of a token by a lane, for one step
// Activations of the next step wait in registers, where so many are left.
constexpr bool X_AHEAD = COL_TILES <= 2;

struct Operands {
  const unsigned char* w;
  const half_bits* sw;
  const half_bits* x;
  int m, x_stride, steps, row_tiles, first_tile, first_token, lane;
};

__device__ inline uint32_t subtract_half2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ inline uint32_t multiply_add_half2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// (bits & mask) | 1024.0 in both halves: one instruction, which the compiler makes two of by itself.
template <uint32_t MASK>
__device__ inline uint32_t biased_halves(uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(bits), "n"(MASK), "r"(0x64006400u));
  return d;
}

struct WeightTile {
  uint32_t words[4 * LANE_VECTORS];

  // Operand register o of MMA i: two codes as halves. i and o are constants after unrolling.
  __device__ inline uint32_t operand(int i, int o) const {
    if constexpr (W_BITS == 8) {
      const uint32_t biased =
          __byte_perm(words[2 * i + o / 2], 0x64646464u, o % 2 == 0 ? 0x4140u : 0x4342u);
      return subtract_half2(biased, 0x64806480u);  // 1152 = 1024 + 128
    } else {
      const uint32_t word = o < 2 ? words[i] : words[i] >> 8;
      if (o % 2 == 0) return subtract_half2(biased_halves<0x000F000Fu>(word), 0x64086408u);
      // 1024 + 16·u: a sixteenth of it less 72 is u - 8.
      return multiply_add_half2(biased_halves<0x00F000F0u>(word), 0x2C002C00u, 0xD480D480u);
    }
  }
};

__device__ inline long long tile_at(const Operands& op, int r, int step) {
  const int row_tile = min(op.first_tile + r, op.row_tiles - 1);  // past the end: never stored
  return static_cast<long long>(row_tile) * op.steps + step;
}

__device__ inline void load_stage(const Operands& op, uint32_t stage, int step, uint64_t policy) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    const unsigned char* tile = op.w + tile_at(op, r, step) * TILE_BYTES;
#pragma unroll
    for (int v = 0; v < LANE_VECTORS; ++v)
      cp_async_16(stage + r * TILE_BYTES + v * 512 + op.lane * 16, tile + v * 512 + op.lane * 16,
                  policy);
  }
}

__device__ inline WeightTile read_tile(uint32_t tile, int lane) {
  WeightTile t;
#pragma unroll
  for (int v = 0; v < LANE_VECTORS; ++v) {
    const uint4 q = load_shared(tile + v * 512 + lane * 16);
    t.words[4 * v] = q.x, t.words[4 * v + 1] = q.y, t.words[4 * v + 2] = q.z, t.words[4 * v + 3] = q.w;
  }
  return t;
}

// What a step needs beside the tiles, for this lane: its k of a token in each column tile and, where
// scales change along K, those of its two rows in each row tile.
struct Small {
  uint4 x[COL_TILES][X_VECTORS];
  uint32_t row_scales[ROW_TILES];
};

__device__ inline void load_small(Small& s, const Operands& op, int step) {
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j) {
    const int token = op.first_token + j * MMA_TOKENS + op.lane / 4;
#pragma unroll
    for (int v = 0; v < X_VECTORS; ++v) {
      const int k = step * STEP_K + 32 * v + 8 * (op.lane % 4);
      const bool inside = token < op.m && k < op.x_stride;
      // Not ld.global.nc: the kernel that wrote x may have run beside this one.
      const half_bits* at = op.x + static_cast<long long>(token) * op.x_stride + k;
      s.x[j][v] = inside ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
    }
  }
  if constexpr (W_BITS == 4) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(op.sw);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
      s.row_scales[r] = __ldg(pairs + tile_at(op, r, step) * (MMA_ROWS / 2) + op.lane / 4);
  }
}

// One row tile and one step: totals gain its products, as they are or times the scales of the step.
__device__ inline void multiply_tile(float (&total)[COL_TILES][4], const WeightTile& weights,
                                     const Small& small, [[maybe_unused]] uint32_t scales) {
  float sums[COL_TILES][4];
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] = W_BITS == 8 ? total[j][e] : 0.0f;
#pragma unroll
  for (int i = 0; i < MMAS; ++i) {
    const uint32_t a[4] = {weights.operand(i, 0), weights.operand(i, 1), weights.operand(i, 2),
                           weights.operand(i, 3)};
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
      const uint4 t = small.x[j][i / 2];
      const uint32_t b[2] = {i % 2 == 0 ? t.x : t.z, i % 2 == 0 ? t.y : t.w};
      mma_f16_m16n8k16(sums[j], a, b);
    }
  }
  const float top = half_to_float(static_cast<half_bits>(scales));
  const float bottom = half_to_float(static_cast<half_bits>(scales >> 16));
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      total[j][e] = W_BITS == 8 ? sums[j][e] : total[j][e] + sums[j][e] * (e < 2 ? top : bottom);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
weight_only(const unsigned char* w, const half_bits* sw, const half_bits* x, const half_bits* bias,
            half_bits* y, int m, int n, int k, int x_stride) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;
  const int steps = (k + STEP_K - 1) / STEP_K;
  const Operands op{w,
                    sw,
                    x,
                    m,
                    x_stride,
                    steps,
                    (n + MMA_ROWS - 1) / MMA_ROWS,
                    static_cast<int>(blockIdx.x) / K_SPLIT * ROW_TILES,
                    static_cast<int>(blockIdx.y) * TOKENS,
                    lane};
  const uint64_t policy = evict_first_policy();
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT;
  constexpr int STRIDE = WARPS * K_SPLIT;  // in steps, between two turns of a warp
  const int first_step = rank * WARPS + warp;

  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    const int step = first_step + s * STRIDE;
    if (step < steps) load_stage(op, ring + s * STAGE_BYTES, step, policy);
    cp_async_commit();
  }
  wait_for_previous_kernel();  // weights are constant; activations may be what it just wrote

  float total[ROW_TILES][COL_TILES][4] = {};
  Small next;
  if constexpr (X_AHEAD) {
    if (first_step < steps) load_small(next, op, first_step);
  }
  int slot = 0;
  for (int step = first_step; step < steps; step += STRIDE) {
    Small now;
    if constexpr (X_AHEAD) {
      now = next;
    } else {
      load_small(now, op, step);
    }
    cp_async_wait<STAGES - 2>();
    __syncwarp();  // every lane's copies have landed, and every lane has left the slot written below
    const int ahead = step + (STAGES - 1) * STRIDE;
    const int ahead_slot = slot == 0 ? STAGES - 1 : slot - 1;
    if (ahead < steps) load_stage(op, ring + ahead_slot * STAGE_BYTES, ahead, policy);
    cp_async_commit();
    if constexpr (X_AHEAD) {
      if (step + STRIDE < steps) load_small(next, op, step + STRIDE);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
      multiply_tile(total[r], read_tile(ring + slot * STAGE_BYTES + r * TILE_BYTES, lane), now,
                    W_BITS == 4 ? now.row_scales[r] : 0u);
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }

  // The warps meet: [warp][row tile][column tile][lane], each tile as an MMA leaves it in its lanes.
  cp_async_wait<0>();
  __syncthreads();
  float4* red = reinterpret_cast<float4*>(shared);
  constexpr int SHARES = ROW_TILES * COL_TILES * 32;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
      const float(&t)[4] = total[r][j];
      red[warp * SHARES + (r * COL_TILES + j) * 32 + lane] = make_float4(t[0], t[1], t[2], t[3]);
    }
  meet();
  for (int share = rank * WARPS * 32 + threadIdx.x; share < SHARES; share += STRIDE * 32) {
    float4 sum = {};
#pragma unroll
    for (int from = 0; from < STRIDE; ++from) {
      const float4 part = share_of(red + from % WARPS * SHARES + share, from / WARPS);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    const int of_lane = share % 32, j = share / 32 % COL_TILES, r = share / 32 / COL_TILES;
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = op.first_token + j * MMA_TOKENS + of_lane % 4 * 2 + e % 2;
      const int feature = (op.first_tile + r) * MMA_ROWS + of_lane / 4 + e / 2 * 8;
      if (token < m && feature < n) {
        const float scale = W_BITS == 8 ? half_to_float(sw[feature]) : 1.0f;
        const float b = bias == nullptr ? 0.0f : half_to_float(bias[feature]);
        y[static_cast<long long>(token) * n + feature] = float_to_half(sums[e] * scale + b);
      }
    }
  }
  if constexpr (K_SPLIT > 1) meet();  // nobody's shared memory goes while another reads it
}
