// grouped/few_tokens.cu: Y[rows of e] = X[rows of e] . W[e]^T of each expert e on int8 tensor cores, few tokens each.
//   w      chunks of grouped/layout.cuh          sn  half [EXPERTS, N], scales of output features
//   x      int8 [ROWS, K], row-major             sx  float [ROWS], scales of rows
//   sizes  int [EXPERTS], rows of each           y   half [ROWS, N], row-major
// Rows are sorted by expert: one after the other, or, with rows_apart > 0, those of expert e from e * rows_apart on.
// Only experts with rows are read, once for each TOKENS of their rows.
//
// A producer thread copies GROUPS chunks of weights and the tokens' codes of these groups to a ring of STAGES in shared
// memory, without pause over all of a block's work. BLOCK_TILES consumer warps multiply, each one row tile and all
// tokens over all of K. RESIDENT: blocks of an SM. Work is divided on the device (grouped/routing.cuh).
// is_early: sizes were written before the previous kernel started, so they may be read before it has ended.
#if !defined(COL_TILES) || !defined(GROUPS) || !defined(STAGES) || !defined(RESIDENT)
#error "define COL_TILES, GROUPS, STAGES and RESIDENT"
#endif
constexpr int TOKENS = COL_TILES * 8, ROW_BLOCKS = 1;
constexpr bool STREAM_K = true;
#include "grouped/layout.cuh"
#include "grouped/routing.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/synchronization.cuh"
#include "ptx/tma.cuh"

static_assert(COL_TILES <= 2 || COL_TILES % 4 == 0, "COL_TILES must be 1, 2 or a multiple of 4");
constexpr int THREADS = BLOCK_TILES * 32 + 32;
constexpr int CODES_AT = (GROUPS * CHUNK_BYTES + 1023) / 1024 * 1024;  // in a stage, after the weights
constexpr int GROUP_CODES_BYTES = TOKENS * GROUP;
constexpr int STAGE_BYTES = CODES_AT + GROUPS * GROUP_CODES_BYTES;
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES, COUNT_AT = BARRIERS_AT + STAGES * 16, LIST_AT = COUNT_AT + 16;
constexpr int MARKS = COL_TILES * 2 * 32;  // of a warp's partial sums

// Tokens that one load of codes brings: 8, 16 or 32.
__device__ inline int tokens_of_load(int tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32; }

// B operands of one group for 8 tokens: of each MMA the first 16 k, then the others.
__device__ inline void load_codes(uint32_t (&b)[MMAS][2], uint32_t codes, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t at = codes + lane % 8 * GROUP + ((half * 4 + lane / 8) ^ (lane % 8)) * 16;
    load_matrices(b[2 * half][0], b[2 * half][1], b[2 * half + 1][0], b[2 * half + 1][1], at);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
grouped_few(const __grid_constant__ TensorMap x8, const __grid_constant__ TensorMap x16,
            const __grid_constant__ TensorMap x32, const unsigned char* w, const half_bits* sn, const float* sx,
            const int* sizes, half_bits* y, Marked* partial_sums, int launch, int experts, int n, int k, int rows_apart,
            int is_early) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  Touched* touched = reinterpret_cast<Touched*>(shared + LIST_AT);
  int& touched_count = *reinterpret_cast<int*>(shared + COUNT_AT);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (!is_early) wait_for_previous_kernel();
  if (warp == 0) {
    const int count = list_touched(touched, sizes, experts, rows_apart, lane);
    if (lane == 0) touched_count = count;
  } else if (threadIdx.x == 32) {
    for (int s = 0; s < STAGES; ++s) mbarrier_init(full + s * 8, 1), mbarrier_init(empty + s * 8, BLOCK_TILES);
    fence_mbarrier_init();
  } else if (threadIdx.x == THREADS - 32) {
    prefetch_tensor_map(x8);
    if constexpr (COL_TILES > 1) prefetch_tensor_map(x16);
    if constexpr (COL_TILES > 2) prefetch_tensor_map(x32);
  }
  __syncthreads();
  const Expert of(n, k);
  Parts parts(of, touched, touched_count, gridDim.x - 1 - blockIdx.x, gridDim.x);
  Part part;
  int slot = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  };

  if (warp == BLOCK_TILES) {
    if (lane == 0) {
      const uint64_t once = evict_first_policy(), again = evict_normal_policy();
      bool must_wait = true;
      while (parts.next(part)) {
        const int tiles = of.tiles_of(part.row_block), load = tokens_of_load(part.tokens);
        const int loads = (part.tokens + load - 1) / load;
        const TensorMap& x = load == 8 ? x8 : load == 16 ? x16 : x32;
        const unsigned char* from = w + of.begin_of(part.expert, part.row_block);
        for (int step = part.from; step < part.to; step += GROUPS) {
          const int groups = min(GROUPS, part.to - step);
          const int begin = of.bytes_before(step) * tiles, bytes = of.bytes_before(step + groups) * tiles - begin;
          const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
          mbarrier_wait(empty + slot * 8, parity ^ 1);
          mbarrier_arrive_expect_tx(barrier, bytes + groups * loads * load * GROUP);
          bulk_load(stage, from + begin, bytes, barrier, part.is_shared ? again : once);
          if (must_wait) wait_for_previous_kernel(), let_next_kernel_start(), must_wait = false;
          for (int g = 0; g < groups; ++g)
            for (int i = 0; i < loads; ++i)
              tma_load_2d(stage + CODES_AT + g * GROUP_CODES_BYTES + i * load * GROUP, x, (step + g) * GROUP,
                          part.first_row + i * load, barrier);
          advance();
        }
      }
    }
    return;
  }

  wait_for_previous_kernel();
  while (parts.next(part)) {
    const int tiles = of.tiles_of(part.row_block), columns = (part.tokens + MMA_TOKENS - 1) / MMA_TOKENS;
    const int feature = (part.row_block * BLOCK_TILES + warp) * MMA_ROWS + lane / 4;
    const bool has_rows = warp < tiles, is_owner = part.from == 0;
    float feature_scale[2] = {};
    float2 token_scale[COL_TILES] = {};
    if (has_rows && is_owner) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (feature + 8 * i < n)
          feature_scale[i] = half_to_float(load_early(sn + static_cast<long long>(part.expert) * n + feature + 8 * i));
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
        const int token = j * MMA_TOKENS + lane % 4 * 2;
        if (token < part.tokens) token_scale[j].x = load_written(sx + part.first_row + token);
        if (token + 1 < part.tokens) token_scale[j].y = load_written(sx + part.first_row + token + 1);
      }
    }
    int total[COL_TILES][4] = {};
    for (int step = part.from; step < part.to; step += GROUPS) {
      const int groups = min(GROUPS, part.to - step);
      const uint32_t stage = ring + slot * STAGE_BYTES;
      mbarrier_wait(full + slot * 8, parity);
      if (has_rows) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          if (g >= groups) break;
          const int mmas = of.mmas_of(step + g);
          LaneTile weights;
          weights.load(stage + g * (WHOLE_TILE_BYTES + TILE_SCALE_BYTES) * tiles, warp, tiles, mmas, lane);
#pragma unroll
          for (int j = 0; j < COL_TILES; ++j) {
            if (j >= columns) break;
            uint32_t b[MMAS][2];
            load_codes(b, stage + CODES_AT + g * GROUP_CODES_BYTES + j * MMA_TOKENS * GROUP, lane);
#pragma unroll
            for (int i = 0; i < MMAS; ++i)
              if (i < mmas) mma_s8_m16n8k32(total[j], weights.a[i], b[i]);
          }
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + slot * 8);
      advance();
    }
    if (!has_rows) continue;
    const auto warp_partials = [&](int block) { return partial_sums + (block * BLOCK_TILES + warp) * MARKS + lane; };
    if (!is_owner) {
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
        if (j >= columns) break;
        Marked* to = warp_partials(parts.block) + j * 64;
        store_marked(to, Marked(__int_as_float(total[j][0]), __int_as_float(total[j][1]), launch));
        store_marked(to + 32, Marked(__int_as_float(total[j][2]), __int_as_float(total[j][3]), launch));
      }
      continue;
    }
    if (part.to < of.steps)
      for (int other = parts.block + 1; parts.begin_of(other) < (part.output + 1) * of.steps; ++other)
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j) {
          if (j >= columns) break;
          const Marked* from = warp_partials(other) + j * 64;
          Marked low, high;
          do {
            low = load_marked(from), high = load_marked(from + 32);
          } while (!low.has(launch) || !high.has(launch));
          total[j][0] += __float_as_int(low.value(0)), total[j][1] += __float_as_int(low.value(1));
          total[j][2] += __float_as_int(high.value(0)), total[j][3] += __float_as_int(high.value(1));
        }
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = j * MMA_TOKENS + lane % 4 * 2 + e % 2;
        if (token >= part.tokens || feature + e / 2 * 8 >= n) continue;
        const float scaled = static_cast<float>(total[j][e]) * feature_scale[e / 2];
        y[static_cast<long long>(part.first_row + token) * n + feature + e / 2 * 8] =
            float_to_half(scaled * (e % 2 == 0 ? token_scale[j].x : token_scale[j].y));
      }
  }
}
