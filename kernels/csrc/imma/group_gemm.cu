// imma/group_gemm.cu: Y[M,N] = X[M,K] . W[N,K]^T on int8 tensor cores, 6- or 4-bit weights, few tokens.
// For flexq-imma, group-w4a8, dgq-w4a8 and atom-w4a4: the defines of imma/layout.cuh choose the operands. The
// function keeps the name flexq_imma of stored profiles.
//   w     tiles [N/16, T] of imma/layout.cuh         sw  uint32 [N/16, T, 8], their scales
//   x     int8 [M, K_PAD], row-major                 sx  float [K/128, M_PAD], FP16 values
//   bias  half [N] or null                           y   half [M, N], row-major
//   sn    half [N], scales of output features; DUAL_GRAINED only, whose sums are integers over all of K,
//         scaled once
// A_GROUPED 0: sx is float [M_PAD], one scale per token.
// K/128 is rounded up, K_PAD = 128 * K/128, T = K/128, one more with an INT8_TAIL; M_PAD is M rounded up
// to 8.
//
// The K_SPLIT blocks of a cluster compute ROW_TILES rows of tiles. Their warps split K, each with its own cp.async
// ring buffer in shared memory. Partial sums are reduced once, in a fixed order: results are deterministic.
// Programmatic dependent launch: blocks of the next kernel load their weights as soon as the last blocks of this one
// have started, so that no SM idles in the tail. K_SPLIT > 1 is for shapes with so few rows that SMs would get
// unequal shares. LATE is for shapes whose blocks do not fill the SMs: the next kernel's blocks may start only when
// this one's have issued their last loads of weights, so that they do not compete for bandwidth.
//
// Activations and scales are loaded AHEAD steps early. With one row tile a step is shorter than their latency, and
// more stages of weights do not help.
//
// EARLY: what a block does, besides requesting STAGES - 1 steps of weights, before it waits for the previous kernel.
// 1: it loads its first scales, and prefetches the others. 2: it also widens each warp's first step, which then
// only has to be multiplied. 3: it also requests two more steps, so the whole ring and the registers are full.
// RESIDENT: blocks per SM that must have enough registers; 1: any number.
#include "imma/layout.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

#if !defined(COL_TILES) || !defined(ROW_TILES) || !defined(WARPS) || !defined(STAGES) || \
    !defined(K_SPLIT) || !defined(LATE) || !defined(AHEAD) || !defined(EARLY) || !defined(RESIDENT)
#error "define COL_TILES, ROW_TILES, WARPS, STAGES, K_SPLIT, LATE, AHEAD, EARLY and RESIDENT"
#endif
#include "common/k_split.cuh"
// Up to 8 tokens of 6 bits: pointers advance with each load, so that little is computed for one, above all after the
// wait for the previous kernel. Configurations for others were timed without. Where activations come one step early, it
// takes too many registers: fewer blocks fit an SM.
#define ADVANCES (COL_TILES == 1 && W_BITS == 6 && AHEAD > 1)
// The sums of a group are multiplied by its scale, not its weights, which takes fewer instructions.
#define SCALES_SUMS (ADVANCES && DUAL_GRAINED)
constexpr bool WIDENS_EARLY = EARLY >= 2, FILLS_RING = EARLY >= 3;
constexpr int FIRST_STEPS = FILLS_RING ? 2 : WIDENS_EARLY ? 1 : 0;  // of a warp that differ from later ones
constexpr int STRIDE = WARPS * K_SPLIT;  // from one step of a warp to its next
constexpr int TOKENS = COL_TILES * MMA_TOKENS;
constexpr int STAGE_BYTES = ROW_TILES * TILE_BYTES;
static_assert(STAGES >= 2, "STAGES must be at least 2: one is multiplied while the others load");
static_assert(!FILLS_RING || !LATE, "EARLY 3 needs LATE 0: it requests weights before the next kernel may start");
static_assert(!WIDENS_EARLY || !INT4_MMA, "EARLY 2 and 3 need INT4_MMA 0, which has no widened weights");

// Pointers are to the first element, or with ADVANCES to what this lane loads next in the first row tile.
struct Operands {
  const unsigned char* w;
  const uint32_t* sw;
  const int8_t* x;
  const float* sx;
  int m, m_padded, groups, steps, row_tiles, first_tile, first_token, lane;
  int row_steps[ROW_TILES];  // with ADVANCES: from the first row tile
};

__device__ inline long long tile_at(const Operands& op, int r, int step) {
  const int row_tile = min(op.first_tile + r, op.row_tiles - 1);  // past the end: never stored
  return static_cast<long long>(row_tile) * op.steps + step;
}

// stage: with ADVANCES of this lane.
__device__ inline void load_stage(Operands& op, uint32_t stage, int step, uint64_t policy) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    const long long steps = ADVANCES ? op.row_steps[r] : tile_at(op, r, step);
    const unsigned char* tile = op.w + steps * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < TILE_BYTES / 512; ++i)
      cp_async_16(stage + r * TILE_BYTES + i * 512 + (ADVANCES ? 0 : op.lane * 16),
                  tile + i * 512 + (ADVANCES ? 0 : op.lane * 16), policy);
  }
  if constexpr (ADVANCES) op.w += STRIDE * TILE_BYTES;
}

// A lane's accumulator fragment of a tile. bits, add: its form in shared memory.
struct Fragment {
  Sum values[4];

  __device__ inline float4 bits() const {
    return make_float4(bits_of(values[0]), bits_of(values[1]), bits_of(values[2]), bits_of(values[3]));
  }

  __device__ inline void add(float4 part) {
    values[0] += sum_of(part.x), values[1] += sum_of(part.y);
    values[2] += sum_of(part.z), values[3] += sum_of(part.w);
  }
};

// A lane's operands of a step other than weights: 32 adjacent k of a token in each column tile, the scales of the
// two tokens of its accumulators, and those of its two rows in each row tile.
struct StepOperands {
  TokenCodes codes[COL_TILES];
  float2 token_scale[COL_TILES];
  uint32_t row_scales[ROW_TILES];
};

// AT_ONCE: the compiler may not delay the loads until after a wait.
template <bool AT_ONCE>
__device__ inline void load_row_scales(StepOperands& s, Operands& op, int step) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    const uint32_t* scales = ADVANCES ? op.sw + op.row_steps[r] * (MMA_ROWS / 2)
                                      : op.sw + tile_at(op, r, step) * (MMA_ROWS / 2) + op.lane / 4;
    s.row_scales[r] = AT_ONCE ? load_early(scales) : __ldg(scales);
  }
  if constexpr (ADVANCES) op.sw += STRIDE * (MMA_ROWS / 2);
}

__device__ inline void load_tokens(StepOperands& s, Operands& op, int step) {
  if constexpr (ADVANCES) {
    s.codes[0].half[0] = load_written(reinterpret_cast<const uint4*>(op.x));
    s.codes[0].half[1] = load_written(reinterpret_cast<const uint4*>(op.x) + 1);
    if constexpr (A_GROUPED) s.token_scale[0] = load_written(reinterpret_cast<const float2*>(op.sx));
    op.x += STRIDE * GROUP, op.sx += STRIDE * op.m_padded;
    return;
  }
#pragma unroll
  for (int j = 0; j < COL_TILES; ++j) {
    const int token = op.first_token + j * MMA_TOKENS + op.lane / 4;
    const uint4* at = reinterpret_cast<const uint4*>(
        op.x + (static_cast<long long>(token) * op.groups + group_of(step, op.groups)) * GROUP +
        LANE_K * (op.lane % 4));
    s.codes[j].half[0] = token < op.m ? load_written(at) : make_uint4(0, 0, 0, 0);
    s.codes[j].half[1] = token < op.m ? load_written(at + 1) : make_uint4(0, 0, 0, 0);
    if constexpr (A_GROUPED) {
      const int pair = op.first_token + j * MMA_TOKENS + op.lane % 4 * 2;
      const float* scale =
          op.sx + static_cast<long long>(group_of(step, op.groups)) * op.m_padded + pair;
      s.token_scale[j] = pair < op.m_padded ? load_written(reinterpret_cast<const float2*>(scale))
                                            : make_float2(0.0f, 0.0f);
    }
  }
}

// Prefetch the scales of all steps of this block's rows.
__device__ inline void prefetch_row_scales(const Operands& op, const uint32_t* sw) {
  constexpr int LINE_TILES = 4;  // whose scales are a cache line
  const int lines = (op.steps + LINE_TILES - 1) / LINE_TILES;
  for (int i = threadIdx.x; i < lines * ROW_TILES; i += WARPS * 32)
    prefetch_to_l2(sw + tile_at(op, i / lines, i % lines * LINE_TILES) * (MMA_ROWS / 2));
}

// One A operand register of MMA o/4, with SCALES_SUMS not yet scaled.
__device__ inline uint32_t operand_of(const WeightTile& weights, int o) {
#if SCALES_SUMS
  return weights.unsigned_codes(o);
#else
  return weights.operand(o);
#endif
}

// The A operands of a tile, widened before they are multiplied.
struct WidenedTile {
  uint32_t a[MMAS][4];

  __device__ inline void widen(const WeightTile& weights) {
#pragma unroll
    for (int o = 0; o < OPERAND_WORDS; ++o) {
      a[o / 4][o % 4] = operand_of(weights, o);
      asm volatile("" : "+r"(a[o / 4][o % 4]));  // not later
    }
  }
};

// Prefetch the scales of this block's features, because nothing hides the latency of loads in the epilogue.
__device__ inline void prefetch_features(const half_bits* sn, int n) {
  constexpr int SECTOR = 16;  // halves
  const int first = static_cast<int>(blockIdx.x) / K_SPLIT * ROW_TILES * MMA_ROWS;
  const int feature = first + static_cast<int>(threadIdx.x) * SECTOR;
  if (threadIdx.x < ROW_TILES * MMA_ROWS / SECTOR && feature < n) prefetch_to_l2(sn + feature);
}

// Scales of a thread's first outputs are loaded before the mainloop, so that the epilogue does not wait for them.
// Not for DGQ's 4-bit kernels: their configurations were timed without.
constexpr bool SCALES_EARLY = DUAL_GRAINED && W_BITS == 6;
struct EarlyScales {
  float token_scale[2] = {}, feature_scale[2] = {};

  __device__ inline EarlyScales() {}
  // fragment: its index in the epilogue.
  __device__ inline EarlyScales(const Operands& op, int fragment, int n, const float* sx, const half_bits* sn) {
    const int fragment_lane = fragment % 32, j = fragment / 32 % COL_TILES, r = fragment / 32 / COL_TILES;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = op.first_token + j * MMA_TOKENS + fragment_lane % 4 * 2 + i;
      const int feature = (op.first_tile + r) * MMA_ROWS + fragment_lane / 4 + i * 8;
      if (token < op.m) token_scale[i] = load_written(sx + token);
      if (feature < n) feature_scale[i] = half_to_float(load_early(sn + feature));
    }
  }
};

#if RESIDENT > 1
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
#else
extern "C" __global__ void __launch_bounds__(WARPS * 32)
#endif
flexq_imma(const unsigned char* w, const uint32_t* sw, const int8_t* x, const float* sx, const half_bits* bias,
           half_bits* y, int m, int n, int k, [[maybe_unused]] const half_bits* sn) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // With ADVANCES of this lane, at `slot`.
  uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES + (ADVANCES ? lane * 16 : 0);
  const int groups = (k + GROUP - 1) / GROUP, steps = tiles_along(groups);
  Operands op{w,
              sw,
              x,
              sx,
              m,
              (m + MMA_TOKENS - 1) / MMA_TOKENS * MMA_TOKENS,
              groups,
              steps,
              (n + MMA_ROWS - 1) / MMA_ROWS,
              static_cast<int>(blockIdx.x) / K_SPLIT * ROW_TILES,
              static_cast<int>(blockIdx.y) * TOKENS,
              lane};
  const uint64_t policy = evict_first_policy();
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT;
  // Shuffled, it is known to be the same in all lanes, so that branches are uniform.
  const int own_step = rank * WARPS + warp, first_step = ADVANCES ? __shfl_sync(0xFFFFFFFFu, own_step, 0) : own_step;
  if constexpr (ADVANCES) {
    const long long tile = static_cast<long long>(op.first_tile) * steps + own_step;
    op.w += tile * TILE_BYTES + lane * 16, op.sw += tile * (MMA_ROWS / 2) + lane / 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
      op.row_steps[r] = r == 0 ? 0 : min(r, op.row_tiles - 1 - op.first_tile) * steps;
  }

  if constexpr (!LATE) let_next_kernel_start();
  if constexpr (DUAL_GRAINED) prefetch_features(sn, n);
  const auto request = [&](int slot, int step) {
    if (step < steps) load_stage(op, ring + slot * STAGE_BYTES, step, policy);
    cp_async_commit();
  };
  StepOperands queue[AHEAD == 1 ? 1 : AHEAD + 1];
  if constexpr (EARLY) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first_step + i * STRIDE < steps) load_row_scales<true>(queue[i], op, first_step + i * STRIDE);
  }
#pragma unroll
  for (int s = 0; s < (FILLS_RING ? STAGES : STAGES - 1); ++s) request(s, first_step + s * STRIDE);
  if constexpr (EARLY) prefetch_row_scales(op, sw);
  [[maybe_unused]] WidenedTile first_tiles[ROW_TILES];
  if constexpr (WIDENS_EARLY) {
    cp_async_wait<FILLS_RING ? STAGES - 1 : STAGES - 2>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
      first_tiles[r].widen(
          WeightTile(ring + r * TILE_BYTES, queue[0].row_scales[r], ADVANCES ? 0 : lane, first_step == groups - 1));
    __syncwarp();  // no lane still reads the slot that is written below
    if constexpr (FILLS_RING) request(0, first_step + STAGES * STRIDE);
  }
  if constexpr (ADVANCES) {  // tokens past the end are never stored: they are the last one
    const int token = min(op.first_token + lane / 4, m - 1);
    op.x += (static_cast<long long>(token) * groups + own_step) * GROUP + LANE_K * (lane % 4);
    op.sx += own_step * op.m_padded + op.first_token + lane % 4 * 2;
  }
  wait_for_previous_kernel();  // weights are constant, activations may be its output

  Fragment total[ROW_TILES][COL_TILES] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
    if (first_step + i * STRIDE < steps) {
      load_tokens(queue[i], op, first_step + i * STRIDE);
      if constexpr (!EARLY) load_row_scales<false>(queue[i], op, first_step + i * STRIDE);
    }
  constexpr int FRAGMENTS = ROW_TILES * COL_TILES * 32;
  [[maybe_unused]] EarlyScales early;
  if constexpr (SCALES_EARLY) {
    const int first_fragment = rank * WARPS * 32 + threadIdx.x;
    if (first_fragment < FRAGMENTS) early = EarlyScales(op, first_fragment, n, sx, sn);
  }
  int slot = 0;
  // number: of this warp's step; FIRST_STEPS: any later one.
  const auto multiply = [&](int number, int step, const StepOperands& now, StepOperands& next) {
    const bool is_widened = WIDENS_EARLY && number == 0, is_requested = FILLS_RING && number < FIRST_STEPS;
    if (!is_widened) {
      if (is_requested) cp_async_wait<STAGES - 1>();
      else cp_async_wait<STAGES - 2>();
    }
    __syncwarp();  // all copies are complete, and no lane still reads the slot that is written below
    const int ahead = step + (STAGES - 1) * STRIDE;
    if (!is_requested) {
      const int ahead_slot = slot == 0 ? STAGES - 1 : slot - 1;
      const uint32_t stage = ring + (ADVANCES ? ahead_slot - slot : ahead_slot) * STAGE_BYTES;
      if (ahead < steps) load_stage(op, stage, ahead, policy);
      else if constexpr (LATE) let_next_kernel_start();
      cp_async_commit();
    }
    if (step + AHEAD * STRIDE < steps) {
      load_tokens(next, op, step + AHEAD * STRIDE);
      load_row_scales<false>(next, op, step + AHEAD * STRIDE);
    }

    [[maybe_unused]] int of_zeros[4] = {};  // sums of the zero point -32 times activations
#pragma unroll
    for (int i = 0; i < (SCALES_SUMS ? MMAS : 0); ++i) {
      uint32_t b[2];
      now.codes[0].operand(b, i);
      mma_s8_m16n8k32(of_zeros, {0xE0E0E0E0u, 0xE0E0E0E0u, 0xE0E0E0E0u, 0xE0E0E0E0u}, b);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const bool upper_tail = step == groups - 1;
      const WeightTile weights = is_widened ? WeightTile(now.row_scales[r], upper_tail)
                                            : WeightTile(ring + (ADVANCES ? 0 : slot * STAGE_BYTES) + r * TILE_BYTES,
                                                         now.row_scales[r], ADVANCES ? 0 : lane, upper_tail);
      const auto operand = [&](int o) { return is_widened ? first_tiles[r].a[o / 4][o % 4] : operand_of(weights, o); };
      int sums[COL_TILES][4] = {};
#if DUAL_GRAINED && !SCALES_SUMS
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[j][e] = total[r][j].values[e];
#endif
#if INT4_MMA
      if (step < groups - 1) {
#pragma unroll
        for (int q = 0; q < INT4_MMAS; ++q) {
          uint32_t a[4];
          weights.nibble_operands(a, q);
#pragma unroll
          for (int j = 0; j < COL_TILES; ++j) {
            uint32_t b[2];
            now.codes[j].nibbles(b, q);
            mma_s4_m16n8k64(sums[j], a, b);
          }
        }
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[j][e] *= 16;  // int8 operands are 16 times the codes
      } else
#endif
#pragma unroll
      for (int i = 0; i < MMAS; ++i) {
        const uint32_t a[4] = {operand(4 * i), operand(4 * i + 1), operand(4 * i + 2), operand(4 * i + 3)};
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j) {
          uint32_t b[2];
          now.codes[j].operand(b, i);
          if constexpr (SCALES_SUMS) mma_u8s8_m16n8k32(sums[j], a, b);
          else mma_s8_m16n8k32(sums[j], a, b);
        }
      }
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#if SCALES_SUMS
          total[r][j].values[e] += (sums[j][e] + of_zeros[e]) * static_cast<int>(weights.factor[e / 2]);
#elif DUAL_GRAINED
          total[r][j].values[e] = sums[j][e];
#else
          float scale = weights.scale[e / 2];
          if constexpr (A_GROUPED)
            scale *= e % 2 == 0 ? now.token_scale[j].x : now.token_scale[j].y;
          total[r][j].values[e] += static_cast<float>(sums[j][e]) * scale;
#endif
        }
      }
    }
    if constexpr (ADVANCES) ring = slot == STAGES - 1 ? ring - (STAGES - 1) * STAGE_BYTES : ring + STAGE_BYTES;
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  };
  int step = first_step;
  if constexpr (AHEAD == 1) {  // slower when unrolled as below
    const auto multiply_next = [&](int number) {
      const StepOperands now = queue[0];
      multiply(number, step, now, queue[0]);
    };
#pragma unroll
    for (int i = 0; i < FIRST_STEPS; ++i, step += STRIDE)
      if (step < steps) multiply_next(i);
    for (; step < steps; step += STRIDE) multiply_next(FIRST_STEPS);
  } else {  // unrolled instead of moving queue entries: a move waits for its load
#pragma unroll
    for (int i = 0; i < FIRST_STEPS; ++i, step += STRIDE)
      if (step < steps) multiply(i, step, queue[i % (AHEAD + 1)], queue[(i + AHEAD) % (AHEAD + 1)]);
    while (step < steps) {
#pragma unroll
      for (int i = FIRST_STEPS; i <= FIRST_STEPS + AHEAD; ++i, step += STRIDE)
        if (step < steps) multiply(FIRST_STEPS, step, queue[i % (AHEAD + 1)], queue[(i + AHEAD) % (AHEAD + 1)]);
    }
  }

  // Reduction over warps: [warp][row tile][column tile][lane] of accumulator fragments.
  cp_async_wait<0>();
  __syncthreads();
  float4* red = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j)
      red[warp * FRAGMENTS + (r * COL_TILES + j) * 32 + lane] = total[r][j].bits();
  sync_k_split();
  for (int fragment = rank * WARPS * 32 + threadIdx.x; fragment < FRAGMENTS; fragment += STRIDE * 32) {
    if constexpr (SCALES_EARLY)
      if (fragment >= STRIDE * 32) early = EarlyScales(op, fragment, n, sx, sn);
    Fragment sum = {};
#pragma unroll
    for (int from = 0; from < STRIDE; ++from) {
      sum.add(partial_sums_of(red + from % WARPS * FRAGMENTS + fragment, from / WARPS));
    }
    const int fragment_lane = fragment % 32, j = fragment / 32 % COL_TILES, r = fragment / 32 / COL_TILES;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = op.first_token + j * MMA_TOKENS + fragment_lane % 4 * 2 + i % 2;
      const int feature = (op.first_tile + r) * MMA_ROWS + fragment_lane / 4 + i / 2 * 8;
      if (token < m && feature < n) {
        const float b = bias == nullptr ? 0.0f : half_to_float(bias[feature]);
        const float value =
            SCALES_EARLY ? static_cast<float>(sum.values[i]) * early.feature_scale[i / 2] * early.token_scale[i % 2]
                         : scaled_output(sum.values[i], token, feature, sx, sn);
        y[static_cast<long long>(token) * n + feature] = float_to_half(value + b);
      }
    }
  }
  if constexpr (K_SPLIT > 1) sync_k_split();  // a block may exit once no other reads its shared memory
}
