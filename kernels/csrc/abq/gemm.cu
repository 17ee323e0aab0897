// abq/gemm.cu: Y[M,N] = X[M,K] . W[N,K]^T on binary tensor cores, operands of 2 to 8 bits (ABQ-LLM).
//   w   uint32 [W_BITS, N, CHUNKS, 4]  bit planes, lowest first; 32 values of k in a word
//   sw  half   [N]                     scale of an output channel
//   x   uint32 [M, A_BITS, CHUNKS, 4]  sx  float [M], scale of a token (an FP16 value)
//   bias half  [N] or null             y   half [M, N], row-major
// CHUNKS = K/128 rounded up; padding is zero. Integer sums run over all of K, so K must be less than
// 2^31 / 2^(W_BITS + A_BITS - 2): then no partial sum overflows int32.
//
// Weights are the 16 rows of m16n8k256, activation bit planes its 8 columns. A lane loads adjacent
// words of k. This permutes k within a step equally for both operands, so sums are unchanged, and it
// makes every shared memory access a full vector without bank conflicts or a swizzle. The planes of
// W are summed by Horner's rule from the top in each step.
//
// A block computes 16*ROW_TILES rows; its warps split K, each with its own cp.async ring buffer. Partial
// sums are reduced once, in shared memory, with the activation's bit planes.
//
// STAGES = 1: no pipeline, copies and computation of a step do not overlap.
// FILL = 0: a tile's columns are 8 tokens of one bit plane, so M is padded to 8; 1: the bit planes of
// a token are adjacent columns, so that one token fills tiles (ABQ-LLM's GEMV elimination).
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

#if !defined(W_BITS) || !defined(A_BITS) || !defined(TOKENS) || !defined(FILL)
#error "define W_BITS, A_BITS, TOKENS and FILL"
#endif
#if !defined(ROW_TILES) || !defined(WARPS) || !defined(STAGES) || !defined(STEP_K)
#error "define ROW_TILES, WARPS, STAGES and STEP_K"
#endif
constexpr int MMA_ROWS = 16, MMA_COLS = 8, MMA_K = 256;  // PTX mma.m16n8k256, b1
constexpr int CHUNK_K = 128;                             // values of k in 16 bytes
constexpr int COL_TILES = FILL ? (TOKENS * A_BITS + MMA_COLS - 1) / MMA_COLS : A_BITS;
constexpr int STEP_CHUNKS = STEP_K / CHUNK_K;            // of a row in a step; also words per lane
constexpr int TILE_CHUNKS = MMA_ROWS * STEP_CHUNKS;      // of one plane of 16 rows
constexpr int STAGE_CHUNKS = ROW_TILES * W_BITS * TILE_CHUNKS;
constexpr int ROWS = ROW_TILES * MMA_ROWS;
constexpr int RED_STRIDE = COL_TILES * MMA_COLS + 1;     // + 1: avoids bank conflicts between rows
constexpr int PENDING = STAGES > 1 ? STAGES - 2 : 0;
// With many columns, registers do not suffice for the next step's activations and the accumulators.
constexpr bool PREFETCH = COL_TILES * STEP_CHUNKS <= 12;
static_assert(W_BITS >= 2 && A_BITS >= 2, "the top bit plane is the sign");
static_assert(STEP_K % MMA_K == 0 && (STEP_CHUNKS == 2 || STEP_CHUNKS == 4), "STEP_K must be 256 or 512");
static_assert(TILE_CHUNKS % 32 == 0, "TILE_CHUNKS must be a multiple of 32: lanes copy equally many chunks");
static_assert(FILL || TOKENS == MMA_COLS, "FILL 0 needs TOKENS 8: a tile's columns are 8 tokens");

struct Operands {
  const uint4* w;
  const uint32_t* column;  // this lane's words of its column in the first tile
  int column_tile;         // stride in words to its column in the next tile
  int n, chunks, columns_left;  // columns_left: this lane's columns before the end of x
  int first_row, lane;
};

// A lane's words of one row of weights or one column of activations in a step.
struct Words {
  uint32_t word[STEP_CHUNKS];
};

__device__ inline Words read_words(const uint32_t* at) {
  Words v;
  if constexpr (STEP_CHUNKS == 4) {
    const uint4 q = *reinterpret_cast<const uint4*>(at);
    v.word[0] = q.x, v.word[1] = q.y, v.word[2] = q.z, v.word[3] = q.w;
  } else {
    const uint2 d = *reinterpret_cast<const uint2*>(at);
    v.word[0] = d.x, v.word[1] = d.y;
  }
  return v;
}

__device__ inline void load_stage(const Operands& op, uint32_t stage, int step, uint64_t policy) {
  // Clamped at the edges: past K activations are zero, past N nothing is stored.
  const int chunk = min(step * STEP_CHUNKS + op.lane % STEP_CHUNKS, op.chunks - 1);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int i = 0; i < TILE_CHUNKS / 32; ++i) {
      const int row_in_tile = (i * 32 + op.lane) / STEP_CHUNKS;
      const int row = min(op.first_row + r * MMA_ROWS + row_in_tile, op.n - 1);
      const uint4* from = op.w + static_cast<long long>(row) * op.chunks + chunk;
#pragma unroll
      for (int s = 0; s < W_BITS; ++s) {
        const uint32_t to = stage + ((r * W_BITS + s) * TILE_CHUNKS + i * 32 + op.lane) * 16;
        cp_async_16(to, from, policy);
        from += static_cast<long long>(op.n) * op.chunks;
      }
    }
  }
}

__device__ inline void load_columns(Words (&x)[COL_TILES], const Operands& op, int step) {
  const bool in_k = step * STEP_CHUNKS + op.lane % 4 * STEP_CHUNKS / 4 < op.chunks;
  const uint32_t* at = op.column + step * STEP_CHUNKS * 4;
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
    x[j] = in_k && j < op.columns_left ? read_words(at + j * op.column_tile) : Words{};
}

// At least one block per SM: without this bound, ptxas spills a word to fit more blocks.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
abq(const uint4* w, const half_bits* sw, const uint32_t* x, const float* sx, const half_bits* bias,
    half_bits* y, int m, int n, int k) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int chunks = (k + CHUNK_K - 1) / CHUNK_K, steps = (chunks + STEP_CHUNKS - 1) / STEP_CHUNKS;
  const int first_token = blockIdx.y * TOKENS;
  // Row token·A_BITS + plane of x is an MMA column. column: this lane's in the first tile.
  const int column = FILL ? first_token * A_BITS + lane / 4 : (first_token + lane / 4) * A_BITS;
  const int column_step = FILL ? MMA_COLS : 1;
  const int columns_left = (m * A_BITS - column + column_step - 1) / column_step;
  const Operands op{w,
                    x + (static_cast<long long>(column) * chunks * 4 + lane % 4 * STEP_CHUNKS),
                    column_step * chunks * 4,
                    n,
                    chunks,
                    columns_left,
                    static_cast<int>(blockIdx.x) * ROWS,
                    lane};
  const uint64_t policy = evict_first_policy();
  unsigned char* ring = shared + warp * STAGES * STAGE_CHUNKS * 16;
  const uint32_t stages = shared_address(ring);

  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    const int step = warp + s * WARPS;
    if (step < steps) load_stage(op, stages + s * STAGE_CHUNKS * 16, step, policy);
    cp_async_commit();
  }
  wait_for_previous_kernel();  // weights are constant, activations may be its output

  int sum[ROW_TILES][COL_TILES][4] = {};
  Words next[COL_TILES];
  if (PREFETCH && warp < steps) load_columns(next, op, warp);
  int slot = 0;
  for (int step = warp; step < steps; step += WARPS) {
    Words now[COL_TILES];
    if constexpr (PREFETCH) {
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) now[j] = next[j];
    } else {
      load_columns(now, op, step);
    }
    if constexpr (STAGES == 1) {
      __syncwarp();  // no lane still reads the slot
      load_stage(op, stages, step, policy);
      cp_async_commit();
    }
    cp_async_wait<PENDING>();
    __syncwarp();  // all copies are complete, and no lane still reads the slot that is written below
    if constexpr (STAGES > 1) {
      const int ahead = step + (STAGES - 1) * WARPS;
      const int ahead_slot = slot == 0 ? STAGES - 1 : slot - 1;
      if (ahead < steps) load_stage(op, stages + ahead_slot * STAGE_CHUNKS * 16, ahead, policy);
      cp_async_commit();
    }
    if (PREFETCH && step + WARPS < steps) load_columns(next, op, step + WARPS);

    const uint32_t* stage = reinterpret_cast<const uint32_t*>(ring) + slot * STAGE_CHUNKS * 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      int c[COL_TILES][4] = {};
#pragma unroll
      for (int s = W_BITS - 1; s >= 0; --s) {
        // Lane 4·g + t: words t·STEP_CHUNKS … of rows g and g + 8, which are contiguous over lanes.
        const uint32_t* plane = stage + (r * W_BITS + s) * TILE_CHUNKS * 4 + lane * STEP_CHUNKS;
        const Words top = read_words(plane), bottom = read_words(plane + 32 * STEP_CHUNKS);
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) c[j][i] += c[j][i];
#pragma unroll
          for (int h = 0; h < STEP_CHUNKS; h += 2) {
            const uint32_t a[4] = {top.word[h], bottom.word[h], top.word[h + 1], bottom.word[h + 1]};
            const uint32_t b[2] = {now[j].word[h], now[j].word[h + 1]};
            mma_b1_m16n8k256(c[j], a, b);
          }
          if (s == W_BITS - 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) c[j][i] = -c[j][i];  // the top plane is the sign
          }
        }
      }
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][j][i] += c[j][i];
    }
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }

  // Reduction over warps: [warp][row][column], then one thread per output, all in integers.
  cp_async_wait<0>();
  __syncthreads();
  int* red = reinterpret_cast<int*>(shared);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = r * MMA_ROWS + lane / 4 + i / 2 * 8;
        const int at = j * MMA_COLS + lane % 4 * 2 + i % 2;
        red[(warp * ROWS + row) * RED_STRIDE + at] = sum[r][j][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * TOKENS; i += WARPS * 32) {
    const int row = i % ROWS, token = i / ROWS;
    const int feature = blockIdx.x * ROWS + row;
    int total = 0;
#pragma unroll
    for (int plane = 0; plane < A_BITS; ++plane) {
      const int at = FILL ? token * A_BITS + plane : plane * MMA_COLS + token;
      int plane_sum = 0;
#pragma unroll
      for (int from = 0; from < WARPS; ++from)
        plane_sum += red[(from * ROWS + row) * RED_STRIDE + at];
      total += plane_sum * (plane == A_BITS - 1 ? -(1 << plane) : 1 << plane);
    }
    if (first_token + token < m && feature < n) {
      const float scale = half_to_float(sw[feature]) * sx[first_token + token];
      const float bias_value = bias == nullptr ? 0.0f : half_to_float(bias[feature]);
      y[static_cast<long long>(first_token + token) * n + feature] =
          float_to_half(static_cast<float>(total) * scale + bias_value);
    }
  }
}
