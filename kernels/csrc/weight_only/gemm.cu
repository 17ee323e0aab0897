// weight_only/gemm.cu: Y[M,N] = X[M,K] . W[N,K]^T on FP16 tensor cores, weights of W_BITS: integers of 8 or 4 bits,
// floats of 8 (E4M3), 6 (E3M2, E2M3), 5 (E3M1) or 4 (E2M1).
//   w     tiles [N/16, K/128] of weight_only/layout.cuh, with the scales of blocks of less than 128 k
//   x     half [M, X_STRIDE], X_STRIDE a multiple of 8
//   sx    TOKEN_SCALES 1: float [M]; 2: float [K/128, M_PAD], M_PAD a multiple of 8. x has codes as halves, which
//         multiply exactly
//   sw    GROUPED 0: half [N], one scale per row; GROUPED 1: half [N/16, K/128, 8, 2], one per row and
//         128 k, rows r and r + 8 adjacent; ZEROS 1: half [N/16, K/128, 8, 4], these two scales and the
//         offsets for their zero points z: 1024 + z of row r, -(64 + z) of row r + 8; SCALES 2: float [N]; SCALES 3:
//         float [N/128, K/128]; unused for other scales in tiles
//   bias  half [N] or null                           y     half [M, N], row-major
// N/16 and K/128 are rounded up; weights past the edges are zero, x past K is zero.
//
// K_SPLIT blocks of a cluster compute ROW_GROUPS times ROW_TILES rows of tiles. Warps with other rows and the same k
// find its activations in L1; those with the same rows split K. Each has its own cp.async ring buffer. Partial sums are
// reduced once, in a fixed order: results are deterministic. Weights are constant, so they are loaded before the
// previous kernel has ended. The next kernel may start at once; LATE 1: only after the loop over K; for shapes whose
// blocks do not fill the SMs. LATE 2: once the previous kernel has ended; then an SM with room for a block of each of
// two launches never gets two of one.
//
// SHARED_X 1: activations go through the ring, too, once for the warps that share k, which then wait for each other.
// WHOLE 1: no warp has more steps than STAGES, so that all of its weights are loaded ahead.
//
// BIAS_SHIFT 0, for floats: the ablation that converts each weight to its value, without the factor 2^-12.
#if !defined(W_BITS) || !defined(GROUPED) || !defined(COL_TILES) || !defined(ROW_TILES) || \
    !defined(WARPS) || !defined(STAGES) || !defined(K_SPLIT) || !defined(LATE)
#error "define W_BITS, GROUPED, COL_TILES, ROW_TILES, WARPS, STAGES, K_SPLIT and LATE"
#endif
#ifndef BIAS_SHIFT
#define BIAS_SHIFT 1
#endif
#ifndef TOKEN_SCALES
#define TOKEN_SCALES 0
#endif
#ifndef ROW_GROUPS
#define ROW_GROUPS 1
#endif
#ifndef SHARED_X
#define SHARED_X 0
#endif
#ifndef WHOLE
#define WHOLE 0
#endif
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/synchronization.cuh"
#include "weight_only/layout.cuh"
#if K_SPLIT > 1 && __CUDA_ARCH__ < 900
#error "thread block clusters need compute capability 9.0"
#endif
static_assert(STAGES >= 2, "STAGES must be at least 2: one is multiplied while the others load");

constexpr int TOKENS = COL_TILES * MMA_TOKENS;
constexpr int K_WARPS = WARPS / ROW_GROUPS, BLOCK_TILES = ROW_GROUPS * ROW_TILES;
static_assert(K_WARPS * ROW_GROUPS == WARPS, "ROW_GROUPS must divide WARPS");
constexpr int STAGE_BYTES = ROW_TILES * TILE_BYTES;
// Factor of the sums: float operands are scaled by 2^-14, 2^-12 or 2^-8, with E4M3 scales by 2^-7.
constexpr int UNIT_EXPONENT = SCALES == 2 ? 7 : EXPONENT_BITS == 2 ? 14 : EXPONENT_BITS == 3 ? 12 : 8;
constexpr float FLOAT_UNIT = 1 << (UNIT_EXPONENT + (SCALES == 4 && !ON_OPERANDS ? 16 : 0));
constexpr float OPERAND_UNIT = IS_FLOAT && BIAS_SHIFT ? FLOAT_UNIT : 1.0f;
constexpr bool FLOAT_ROWS = SCALES == 2 || SCALES == 4, ROW_SCALED = !GROUPED || FLOAT_ROWS;
constexpr bool SCALES_AT_STEP = GROUPED && !IN_TILE;  // are loaded from sw
constexpr int X_VECTORS = STEP_K / 32;  // 16-byte loads of a token by a lane, for one step
constexpr int STRIDE = K_WARPS * K_SPLIT;  // from one step of a warp to its next
constexpr bool SCALES_SUMS = GROUPED && !ON_OPERANDS;
// Each 32 k of all row tiles are multiplied before the next, and their activations of the next step loaded to the same
// registers, if no sum spans more.
constexpr bool BY_VECTOR = IN_TILE && W_BITS < 8 && TOKEN_SCALES != 2 &&
                           (SCALES_SUMS ? SUM_BLOCKS == X_VECTORS : COL_TILES > 1);
// Otherwise prefetch the activations of the next step to other registers, if these suffice.
constexpr bool X_AHEAD = COL_TILES <= 2 && !BY_VECTOR;

// SHARED_X: pieces of a step's activations of 32 k of a column tile, in shared memory in the order of lanes.
constexpr int X_PIECES = SHARED_X ? COL_TILES * X_VECTORS : 0, PIECE_BYTES = 512;
constexpr int OWN_PIECES = (X_PIECES + ROW_GROUPS - 1) / ROW_GROUPS;  // that a warp copies
constexpr bool EVEN_PIECES = OWN_PIECES * ROW_GROUPS == X_PIECES;      // adjacent ones; else each ROW_GROUPS-th
constexpr int X_POINTERS = !SHARED_X ? COL_TILES : EVEN_PIECES ? (OWN_PIECES + X_VECTORS - 1) / X_VECTORS : OWN_PIECES;
static_assert(!SHARED_X || BY_VECTOR, "SHARED_X needs blocks of codes below 8 bits");
static_assert(!WHOLE || (SHARED_X && LATE == 2), "WHOLE needs SHARED_X and LATE 2");
static_assert(!SHARED_X || ROW_GROUPS == 1 || K_WARPS < 16, "a block has 16 barriers");

// Fragments of sums of a block's output; each block of a cluster stores its own share.
constexpr int FRAGMENTS = BLOCK_TILES * COL_TILES * 32, OWN_WARPS = (FRAGMENTS / 32 + K_SPLIT - 1) / K_SPLIT;
constexpr int OWN_FRAGMENTS = OWN_WARPS * 32;
constexpr int RING_BYTES = STAGES * (WARPS * STAGE_BYTES + K_WARPS * X_PIECES * PIECE_BYTES);
// LATE 2: weights are ahead of activations, so each step begins a group of copies of activations, then one of weights.
constexpr bool X_FIRST = SHARED_X && LATE == 2;
constexpr int PENDING = STAGES - 1 < 2 * STAGES - 4 ? STAGES - 1 : 2 * STAGES - 4;  // groups after those of a step
constexpr int SUM_BYTES = K_WARPS * FRAGMENTS * 16;  // where the ring was

struct Operands {
  const unsigned char* w;
  const half_bits* sw;
  const half_bits* x;
  const float* sx;
  int m, x_stride, steps, row_tiles, first_tile, first_token, lane;
};

__device__ inline long long tile_at(const Operands& op, int r, int step) {
  const int row_tile = min(op.first_tile + r, op.row_tiles - 1);  // past the end: never stored
  return static_cast<long long>(row_tile) * op.steps + step;
}

__device__ inline void load_stage(const Operands& op, uint32_t stage, int step, uint64_t policy) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
    copy_tile(stage + r * TILE_BYTES, op.w + tile_at(op, r, step) * TILE_BYTES, op.lane, policy);
}

// BY_VECTOR: where a lane's next weights and activations are; each load moves on by a step of the warp.
struct Cursor {
  const unsigned char* w[ROW_TILES];
  const half_bits* x[X_POINTERS];

  // first_piece: of activations, that the warp copies.
  __device__ inline Cursor(const Operands& op, int step, int first_piece) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) w[r] = op.w + tile_at(op, r, step) * TILE_BYTES + op.lane * 16;
#pragma unroll
    for (int j = 0; j < X_POINTERS; ++j) {
      const int piece = EVEN_PIECES ? first_piece + j * X_VECTORS : min(first_piece + j * ROW_GROUPS, X_PIECES - 1);
      const int of_tile = piece / X_VECTORS * MMA_TOKENS;
      const int token = min(op.first_token + of_tile + op.lane / 4, op.m - 1);  // past the end: never stored
      const int at = step * STEP_K + 32 * (piece % X_VECTORS) + 8 * (op.lane % 4);
      x[j] = op.x + static_cast<long long>(token) * op.x_stride + at;
    }
  }

  __device__ inline void next_x() {
#pragma unroll
    for (int j = 0; j < X_POINTERS; ++j) x[j] += STRIDE * STEP_K;
  }

  // SHARED_X: copy the warp's pieces of a step to shared memory, of which `to` is the first one's address.
  __device__ inline void copy_x(uint32_t to, const Operands& op, int step, int first_piece) {
    const int first_k = step * STEP_K + 8 * (op.lane % 4);
    [[maybe_unused]] const int even_k = first_k + 32 * (first_piece % X_VECTORS);
#pragma unroll
    for (int i = 0; i < OWN_PIECES; ++i) {
      if constexpr (EVEN_PIECES) {
        const int v = i % X_VECTORS;
        const uint4* at = reinterpret_cast<const uint4*>(x[i / X_VECTORS]) + 4 * v;
        cp_async_16_or_zero(to + i * PIECE_BYTES + op.lane * 16, at, even_k + 32 * v < op.x_stride);
      } else {
        const int piece = first_piece + i * ROW_GROUPS;
        const bool inside = first_k + 32 * (piece % X_VECTORS) < op.x_stride;
        if (piece < X_PIECES) cp_async_16_or_zero(to + i * ROW_GROUPS * PIECE_BYTES + op.lane * 16, x[i], inside);
      }
    }
    next_x();
  }

  __device__ inline void load_weights(uint32_t stage, int lane, uint64_t policy) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      copy_lane(stage + r * TILE_BYTES + lane * 16, w[r], lane, policy);
      w[r] += STRIDE * TILE_BYTES;
    }
  }
};

// A lane's operands of a step other than weights: its k of a token in each column tile and, if they are not in tiles,
// the scales of each row tile.
struct StepOperands {
  uint4 x[COL_TILES][X_VECTORS];
  BlockScales scales[SCALES_AT_STEP ? ROW_TILES : 1];
  float2 of_tokens[TOKEN_SCALES == 2 ? COL_TILES : 1];  // scales of the two tokens of a lane's sums
};

// BY_VECTOR: load 32 k of a step's activations.
__device__ inline void load_x(StepOperands& s, const Operands& op, const Cursor& cursor, int step, int v) {
  const bool inside = step * STEP_K + 32 * v + 8 * (op.lane % 4) < op.x_stride;
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j) {
    const uint4* at = reinterpret_cast<const uint4*>(cursor.x[j]) + 4 * v;
    s.x[j][v] = inside ? *at : make_uint4(0, 0, 0, 0);
  }
}

__device__ inline void load_step_operands(StepOperands& s, const Operands& op, int step) {
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j) {
    const int token = op.first_token + j * MMA_TOKENS + op.lane / 4;
#pragma unroll
    for (int v = 0; v < X_VECTORS; ++v) {
      const int k = step * STEP_K + 32 * v + 8 * (op.lane % 4);
      const bool inside = token < op.m && k < op.x_stride;
      // Not ld.global.nc: the kernel that wrote x may have overlapped this one.
      const half_bits* at = op.x + static_cast<long long>(token) * op.x_stride + k;
      s.x[j][v] = inside ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
    }
  }
  if constexpr (TOKEN_SCALES == 2) {
    const int m_padded = (op.m + MMA_TOKENS - 1) / MMA_TOKENS * MMA_TOKENS;
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
      const int token = op.first_token + j * MMA_TOKENS + op.lane % 4 * 2;
      const float2* pairs = reinterpret_cast<const float2*>(op.sx + static_cast<long long>(step) * m_padded + token);
      s.of_tokens[j] = token < m_padded ? load_written(pairs) : make_float2(0.0f, 0.0f);
    }
  }
  if constexpr (SCALES_AT_STEP) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if constexpr (OF_ROW_BLOCKS) {
        const int row_block = min(op.first_tile + r, op.row_tiles - 1) * MMA_ROWS / 128;
        s.scales[r].words[0] = __ldg(reinterpret_cast<const uint32_t*>(op.sw) + row_block * op.steps + step);
        continue;
      }
      const long long at = tile_at(op, r, step) * (MMA_ROWS / 2) + op.lane / 4;
      if constexpr (ZEROS) {
        const uint2 of_rows = __ldg(reinterpret_cast<const uint2*>(op.sw) + at);
        s.scales[r].words[0] = of_rows.x, s.scales[r].words[1] = of_rows.y;
      } else {
        s.scales[r].words[0] = __ldg(reinterpret_cast<const uint32_t*>(op.sw) + at);
      }
    }
  }
}

// Accumulate the products of one row tile and one block of a step's k; if SCALES_SUMS, times its scales.
template <int BLOCKS>
__device__ inline void multiply_block(float (&total)[COL_TILES][4], const WeightTile& weights,
                                      const StepOperands& operands, [[maybe_unused]] const BlockScales& scales,
                                      int block) {
  float sums[COL_TILES][4];
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] = SCALES_SUMS ? 0.0f : total[j][e];
  const Offsets offsets = ZEROS ? Offsets::of_rows(scales.words[2 * block + ZEROS]) : Offsets{};
#pragma unroll
  for (int i = block * MMAS / BLOCKS; i < (block + 1) * MMAS / BLOCKS; ++i) {
    uint32_t a[4];
    weights.operands(a, i, offsets);
    if constexpr (ON_OPERANDS) {
#pragma unroll
      for (int o = 0; o < 4; ++o) a[o] = multiply_half2(a[o], scales.of_operands(i / 2, o % 2));
    }
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
      const uint4 t = operands.x[j][i / 2];
      const uint32_t b[2] = {i % 2 == 0 ? t.x : t.z, i % 2 == 0 ? t.y : t.w};
      mma_f16_m16n8k16(sums[j], a, b);
    }
  }
  const float top = SCALES_SUMS ? scales.of_sums(block, 0) : 1.0f;
  const float bottom = SCALES_SUMS ? scales.of_sums(block, 1) : 1.0f;
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 of_tokens = operands.of_tokens[TOKEN_SCALES == 2 ? j : 0];
      const float of_row = e < 2 ? top : bottom, of_token = e % 2 == 0 ? of_tokens.x : of_tokens.y;
      const float factor = TOKEN_SCALES == 2 ? of_row * of_token : of_row;
      total[j][e] = SCALES_SUMS ? total[j][e] + sums[j][e] * factor : sums[j][e];
    }
}

__device__ inline float4 added(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

#if K_SPLIT > 1
// Sums of a block's own fragments from the other blocks of its cluster, by rank; after the ring in shared memory.
struct Received {
  float4 sums[K_SPLIT - 1][OWN_FRAGMENTS];
  uint64_t mbarrier;

  // Executed by all threads. Other blocks may send after cluster_wait.
  __device__ inline void expect(int rank) {
    const int own = min(OWN_FRAGMENTS, max(FRAGMENTS - rank * OWN_FRAGMENTS, 0));
    if (threadIdx.x == 0) {
      mbarrier_init_for_cluster(shared_address(&mbarrier));
      mbarrier_arrive_expect_tx(shared_address(&mbarrier), (K_SPLIT - 1) * own * 16);
    }
    __syncwarp();
    cluster_arrive();
  }

  __device__ inline void send(const float4& sum, int fragment, int rank) const {
    const int owner = fragment / OWN_FRAGMENTS;
    const float4* to = &sums[rank - (rank > owner)][fragment % OWN_FRAGMENTS];
    store_async(map_shared_rank(shared_address(to), owner), sum, map_shared_rank(shared_address(&mbarrier), owner));
  }

  __device__ inline float4 total(const float4& own, int fragment, int rank) const {
    mbarrier_wait_first_phase(shared_address(&mbarrier));
    float4 total = {};
#pragma unroll
    for (int from = 0; from < K_SPLIT; ++from)
      total = added(total, from == rank ? own : sums[from - (from > rank)][fragment % OWN_FRAGMENTS]);
    return total;
  }
};
#endif

// Scale and bias of a row's outputs.
struct Row {
  uint32_t scale = 0;  // bits of a half, of a float if FLOAT_ROWS
  half_bits bias = 0;

  __device__ inline half_bits output(float sum, float token_scale) const {
    const float of_row = FLOAT_ROWS ? __uint_as_float(scale) : half_to_float(static_cast<half_bits>(scale));
    const float factor = OPERAND_UNIT * (ROW_SCALED ? of_row : 1.0f) * token_scale;
    return float_to_half(sum * factor + half_to_float(bias));
  }
};

__device__ inline Row load_row(const half_bits* sw, const half_bits* bias, int feature, int n) {
  Row row;
  if (feature < n) {
    if constexpr (FLOAT_ROWS) row.scale = load_early(reinterpret_cast<const uint32_t*>(sw) + feature);
    else if constexpr (ROW_SCALED) row.scale = load_early(sw + feature);
    if (bias != nullptr) row.bias = load_early(bias + feature);
  }
  return row;
}

// Scale of a token; 1 if there are none.
__device__ inline float token_scale(const float* sx, int token, int m) {
  return TOKEN_SCALES == 1 && token < m ? load_written(sx + token) : 1.0f;
}

extern "C" __global__ void 
#ifdef RESIDENT  // blocks per SM that must have enough registers
__launch_bounds__(WARPS * 32, RESIDENT)
#else
__launch_bounds__(WARPS * 32)
#endif
weight_only(const unsigned char* w, const half_bits* sw, const half_bits* x, const half_bits* bias,
            half_bits* y, int m, int n, int k, int x_stride
#if TOKEN_SCALES
            , const float* sx
#endif
) {
#if !TOKEN_SCALES
  constexpr const float* sx = nullptr;
#endif
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;
  const int steps = (k + STEP_K - 1) / STEP_K;
  const int first_tile = static_cast<int>(blockIdx.x) / K_SPLIT * BLOCK_TILES;  // of the block
  const Operands op{w,
                    sw,
                    x,
                    sx,
                    m,
                    x_stride,
                    steps,
                    (n + MMA_ROWS - 1) / MMA_ROWS,
                    first_tile + warp % ROW_GROUPS * ROW_TILES,
                    static_cast<int>(blockIdx.y) * TOKENS,
                    lane};
  const uint64_t policy = evict_first_policy();
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT;
  const int first_step = rank * K_WARPS + warp / ROW_GROUPS;

  const int first_piece = warp % ROW_GROUPS * (EVEN_PIECES ? OWN_PIECES : 1);
  Cursor cursor(op, first_step, first_piece);
  [[maybe_unused]] const uint32_t x_ring = shared_address(shared) + WARPS * STAGES * STAGE_BYTES +
                                           warp / ROW_GROUPS * STAGES * X_PIECES * PIECE_BYTES;
  [[maybe_unused]] const auto copy_x = [&](int slot, int step) {
    const uint32_t to = x_ring + (slot * X_PIECES + first_piece) * PIECE_BYTES;
    if constexpr (SHARED_X) cursor.copy_x(to, op, step, first_piece);
  };
  const auto load_weights = [&](uint32_t stage, int step) {
    if constexpr (BY_VECTOR) cursor.load_weights(stage, lane, policy);
    else load_stage(op, stage, step, policy);
  };

  if constexpr (LATE == 0) let_next_kernel_start();
#if K_SPLIT > 1
  Received& received = *reinterpret_cast<Received*>(shared + max(RING_BYTES, SUM_BYTES));
  received.expect(rank);
#endif
#pragma unroll
  for (int s = 0; s < STAGES - 1 + WHOLE; ++s) {
    const int step = first_step + s * STRIDE;
    if (step < steps) load_weights(ring + s * STAGE_BYTES, step);
    cp_async_commit();
  }
  wait_for_previous_kernel();  // weights are constant, activations may be its output
  if constexpr (LATE == 2) let_next_kernel_start();
  if constexpr (SHARED_X) {
#pragma unroll
    for (int s = 0; s < STAGES - 1 + WHOLE; ++s) {
      const int step = first_step + s * STRIDE;
      if (step < steps) copy_x(s, step);
      cp_async_commit();
    }
  }

  // In the reduction a thread has one fragment of four sums, or more. If one, its scales are loaded now, because
  // nothing hides their latency in the epilogue. (With BIAS_SHIFT 0 there are no registers for them.)
  constexpr bool SCALES_AHEAD = (ROW_SCALED || TOKEN_SCALES == 1) && BIAS_SHIFT && OWN_WARPS <= WARPS;
  const int own_warp = rank * OWN_WARPS + warp;  // the first whose fragments the warp stores
  [[maybe_unused]] Row rows[2];
  [[maybe_unused]] float token_scales[2];
  if constexpr (SCALES_AHEAD) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row_tile = first_tile + own_warp / COL_TILES;
      rows[half] = load_row(sw, bias, row_tile * MMA_ROWS + lane / 4 + half * 8, n);
      const int token = op.first_token + own_warp % COL_TILES * MMA_TOKENS + lane % 4 * 2 + half;
      token_scales[half] = token_scale(sx, token, m);
    }
  }

  float total[ROW_TILES][COL_TILES][4] = {};
  StepOperands next;
  if constexpr (BY_VECTOR && !SHARED_X) {
#pragma unroll
    for (int v = 0; v < X_VECTORS; ++v)
      if (first_step < steps) load_x(next, op, cursor, first_step, v);
    cursor.next_x();
  } else if constexpr (X_AHEAD) {
    if (first_step < steps) load_step_operands(next, op, first_step);
  }
  int slot = 0;
  [[maybe_unused]] int x_slot = 0;  // of activations, if X_FIRST
  for (int step = first_step; step < steps; step += STRIDE) {
    StepOperands now;
    if constexpr (X_AHEAD) {
      now = next;
    } else if constexpr (!BY_VECTOR) {
      load_step_operands(now, op, step);
    }
    const bool is_first = step == first_step;
    if constexpr (!X_FIRST) cp_async_wait<STAGES - 2>();
    else if (is_first) cp_async_wait<STAGES - 2 + WHOLE>();
    else cp_async_wait<WHOLE ? STAGES - 2 : PENDING>();
    // All copies are complete, and no lane still reads the slot that is written below.
    if constexpr (SHARED_X && ROW_GROUPS > 1) named_barrier_sync(1 + warp / ROW_GROUPS, ROW_GROUPS * 32);
    else __syncwarp();
    if (X_FIRST && !(WHOLE && is_first)) {
      const int ahead = step + (STAGES - 1) * STRIDE;
      if (ahead < steps) copy_x(x_slot == 0 ? STAGES - 1 : x_slot - 1, ahead);
      cp_async_commit();
    }
    if constexpr (!WHOLE) {
      const int ahead = step + (STAGES - 1) * STRIDE;
      const int ahead_slot = slot == 0 ? STAGES - 1 : slot - 1;
      if (ahead < steps) {
        load_weights(ring + ahead_slot * STAGE_BYTES, ahead);
        if constexpr (!X_FIRST) copy_x(ahead_slot, ahead);
      }
      cp_async_commit();
    }
    if constexpr (X_AHEAD) {
      if (step + STRIDE < steps) load_step_operands(next, op, step + STRIDE);
    }
    const uint32_t stage = ring + slot * STAGE_BYTES;
    if constexpr (SHARED_X) {
      WeightTile tiles[ROW_TILES];
      BlockScales scales[ROW_TILES];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) scales[r].load(stage + r * TILE_BYTES, lane);
#pragma unroll
      for (int v = 0; v < X_VECTORS; ++v) {
        if (v % 2 == 0) {
#pragma unroll
          for (int r = 0; r < ROW_TILES; ++r) tiles[r].load_half(stage + r * TILE_BYTES, lane, v / 2);
        }
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j)
          next.x[j][v] = load_shared(x_ring + ((X_FIRST ? x_slot : slot) * X_PIECES + j * X_VECTORS + v) * PIECE_BYTES +
                                     lane * 16);
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) multiply_block<X_VECTORS>(total[r], tiles[r], next, scales[r], v);
      }
    } else if constexpr (BY_VECTOR) {
      WeightTile tiles[ROW_TILES];
      BlockScales scales[ROW_TILES];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        tiles[r].load(stage + r * TILE_BYTES, lane);
        if constexpr (IN_TILE) scales[r].load(stage + r * TILE_BYTES, lane);
      }
#pragma unroll
      for (int v = 0; v < X_VECTORS; ++v) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) multiply_block<X_VECTORS>(total[r], tiles[r], next, scales[r], v);
        if (step + STRIDE < steps) load_x(next, op, cursor, step + STRIDE, v);
      }
      cursor.next_x();
    } else {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        WeightTile tile;
        tile.load(stage + r * TILE_BYTES, lane);
        BlockScales in_tile;
        if constexpr (IN_TILE) in_tile.load(stage + r * TILE_BYTES, lane);
        const BlockScales& scales = IN_TILE ? in_tile : now.scales[SCALES_AT_STEP ? r : 0];
#pragma unroll
        for (int block = 0; block < SUM_BLOCKS; ++block)
          multiply_block<SUM_BLOCKS>(total[r], tile, now, scales, block);
      }
    }
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    if constexpr (X_FIRST) x_slot = x_slot == STAGES - 1 ? 0 : x_slot + 1;
  }

  if constexpr (LATE == 1) let_next_kernel_start();
  // Reduction over the warps that split K: [warp][row tile][column tile][lane] of accumulator fragments.
  cp_async_wait<0>();
  __syncthreads();
  float4* red = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j) {
      const float(&t)[4] = total[r][j];
      const int tile = warp % ROW_GROUPS * ROW_TILES + r;
      red[warp / ROW_GROUPS * FRAGMENTS + (tile * COL_TILES + j) * 32 + lane] = make_float4(t[0], t[1], t[2], t[3]);
    }
  __syncthreads();
  const auto sum_of_warps = [&](int fragment) {
    float4 sum = {};
#pragma unroll (K_SPLIT > 1 ? 4 : K_WARPS)
    for (int from = 0; from < K_WARPS; ++from) sum = added(sum, red[from * FRAGMENTS + fragment]);
    return sum;
  };
#if K_SPLIT > 1
  cluster_wait();
  for (int fragment = threadIdx.x; fragment < FRAGMENTS; fragment += WARPS * 32)
    if (fragment / OWN_FRAGMENTS != rank) received.send(sum_of_warps(fragment), fragment, rank);
#endif
  const int end = min((rank + 1) * OWN_FRAGMENTS, FRAGMENTS);
  for (int fragment = own_warp * 32 + lane; fragment < end; fragment += WARPS * 32) {
    float4 sum = sum_of_warps(fragment);
#if K_SPLIT > 1
    sum = received.total(sum, fragment, rank);
#endif
    const int fragment_lane = fragment % 32, j = fragment / 32 % COL_TILES, r = fragment / 32 / COL_TILES;
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int feature = (first_tile + r) * MMA_ROWS + fragment_lane / 4 + half * 8;
      const Row row = SCALES_AHEAD ? rows[half] : load_row(sw, bias, feature, n);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int token = op.first_token + j * MMA_TOKENS + fragment_lane % 4 * 2 + odd;
        if (token < m && feature < n) {
          const float of_token = SCALES_AHEAD ? token_scales[odd] : token_scale(sx, token, m);
          y[static_cast<long long>(token) * n + feature] = row.output(sums[2 * half + odd], of_token);
        }
      }
    }
  }
}
