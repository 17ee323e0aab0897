// grouped/few_tokens.cu: Y[rows of e] = X[rows of e] . W[e]^T of each expert e on int8 tensor cores, few tokens each.
//   w      chunks of grouped/layout.cuh          sn  half [EXPERTS, N], scales of output features
//   x      int8 [ROWS, K], row-major             sx  float [ROWS], scales of rows
//   sizes  int [EXPERTS], rows of each           y   half [ROWS, N], row-major
// ELEMENT 1 and 2: w, x and y are FP16 or BF16, without scales (grouped/layout.cuh). HALF_SCALES: sx is half [ROWS, K/128],
// sn is not read, and sums of groups are scaled and added in FP32, in an order that follows from the sizes.
// Rows are sorted by expert: one after the other, or, with rows_apart > 0, those of expert e from e * rows_apart on.
// Only experts with rows are read, once for each TOKENS of their rows.
//
// Blocks are persistent; their shares are computed on the device (grouped/routing.cuh). A producer thread copies GROUPS
// chunks of weights and the tokens' codes of these groups to a ring of STAGES in shared memory, without pause over all
// of a block's work. SETS sets of BLOCK_TILES consumer warps take the groups in turn; a warp of a set multiplies one row tile
// and all tokens. Sets reduce through shared memory. RESIDENT: blocks of an SM that must fit.
//
// Weights are requested before the previous kernel has ended, as soon as it has set `published` to `number`. If that is null,
// for the sizes that are in memory then: once it has ended, they are read again, and if they differ, the stages that were
// loaded are dropped.
#if !defined(COL_TILES) || !defined(GROUPS) || !defined(SETS) || !defined(STAGES) || !defined(RESIDENT)
#error "define COL_TILES, GROUPS, SETS, STAGES and RESIDENT"
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
static_assert(GROUPS % SETS == 0, "GROUPS must be a multiple of SETS: every set has as many groups of a stage");
constexpr int WARPS = SETS * BLOCK_TILES, THREADS = WARPS * 32 + 32;
constexpr int CODES_AT = (GROUPS * CHUNK_BYTES + 1023) / 1024 * 1024;  // in a stage, after the weights
constexpr int GROUP_CODES_BYTES = TOKENS * GROUP;
constexpr int STAGE_BYTES = CODES_AT + GROUPS * GROUP_CODES_BYTES;
constexpr int SET_SUMS_BYTES = BLOCK_TILES * COL_TILES * 32 * 16;  // of a set's accumulators
constexpr int SUMS_AT = STAGES * STAGE_BYTES;                      // two buffers, used in turn
constexpr int BARRIERS_AT = SUMS_AT + 2 * (SETS - 1) * SET_SUMS_BYTES, STATE_AT = BARRIERS_AT + STAGES * 16;
constexpr int LIST_AT = STATE_AT + 16;
// Scales of groups multiply sums, not operands: fewer instructions as long as there are few tokens.
constexpr bool SCALES_SUMS = W_BITS < 8 && COL_TILES == 1 && !HALF_SCALES;
constexpr bool ROW_SCALED = ELEMENT == 0 && !HALF_SCALES;  // outputs, by sn and sx
// 2: a group's operands are loaded before the group before it is multiplied, if registers suffice.
constexpr int BUFFERS = !SCALES_SUMS && SETS == 1 && RESIDENT <= 3 ? 2 : 1;
constexpr int MARKS = COL_TILES * 2 * 32;  // of a warp's partial sums

// Tokens that one load of codes brings: 1, 8, 16 or 32. Blocks that load others' tokens, too, wait for the same lines of L2.
__device__ inline int tokens_of_load(int tokens) { return tokens == 1 ? 1 : tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32; }

// B operands of one group for 8 tokens: of each MMA the first 16 k, then the others. codes: of the lane, for both halves of k.
__device__ inline void load_codes(uint32_t (&b)[MMAS][2], const uint32_t (&codes)[2], int offset) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    load_matrices(b[2 * half][0], b[2 * half][1], b[2 * half + 1][0], b[2 * half + 1][1], codes[half] + offset);
}

__device__ inline bool is_row(const Part& part) { return ELEMENT == 0 && part.tokens == 1; }

#if !HALF_SCALES
__device__ inline void multiply(Sum (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if ELEMENT == 0
  mma_s8_m16n8k32(sums, a, b);
#elif ELEMENT == 1
  mma_f16_m16n8k16(sums, a, b);
#else
  mma_bf16_m16n8k16(sums, a, b);
#endif
}
#endif

#if W_BITS < 8 && !HALF_SCALES
// SCALES_SUMS: add the products of a group. Codes are unsigned; `all` has the sums of activations, which zero points
// multiply. Lower nibbles of two MMAs' words are the operands of one MMA, upper ones, 16 times the codes, of another, so that
// none is shifted; their activations are in the order of `sixteen_of`.
__device__ inline void add_scaled(int (&total)[4], const PackedTile& packed, const uint32_t (&b)[MMAS][2]) {
  constexpr uint32_t ONES[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  int sums[4] = {}, all[4] = {};
#pragma unroll
  for (int m = 0; m < MMAS; ++m) mma_s8_m16n8k32(all, ONES, b[m]);
#pragma unroll
  for (int i = 0; i < MMAS; ++i) {
#if W_BITS == 4
    const bool is_upper = i < MMAS / 2;
    const uint32_t* w = packed.words + i % 2 * 2 * MMA_WORDS;
    const uint32_t mask = is_upper ? 0xF0F0F0F0u : 0x0F0F0F0Fu, a[4] = {w[0] & mask, w[1] & mask, w[2] & mask, w[3] & mask};
    mma_u8s8_m16n8k32(sums, a, b[i % 2 * 2 + is_upper]);
    if (i == MMAS / 2 - 1)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] >>= 4;  // exact
#else
    const uint32_t* w = packed.words + i * MMA_WORDS;
    const uint32_t first_two = selected_bits<0xC0C0C0C0u>(w[0], w[1] >> 2);
    const uint32_t last = selected_bits<0xF0F0F0F0u>(first_two, w[2] >> 4) >> 2;
    const uint32_t a[4] = {w[0] & 0x3F3F3F3Fu, w[1] & 0x3F3F3F3Fu, w[2] & 0x3F3F3F3Fu, last & 0x3F3F3F3Fu};
    mma_s8_m16n8k32(sums, a, b[i]);
#endif
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#if W_BITS == 4
    const uint32_t of_row = packed.scales >> (e / 2 * 16);
    total[e] += static_cast<int8_t>(of_row) * sums[e] + static_cast<int8_t>(of_row >> 8) * all[e];
#else
    total[e] += static_cast<uint8_t>(packed.scales >> (e / 2 * 8)) * (sums[e] - 32 * all[e]);
#endif
  }
}
#endif

#if HALF_SCALES
// Scales of a lane's tokens, of a column tile and a group, and of its rows in that group.
__device__ inline void add_scaled(float (&total)[4], const int (&sums)[4], uint32_t of_rows, const float (&of_tokens)[2]) {
#pragma unroll
  for (int e = 0; e < 4; ++e)
    total[e] += static_cast<float>(sums[e]) * (half_to_float(static_cast<half_bits>(of_rows >> (e / 2 * 16))) * of_tokens[e % 2]);
}
#endif

// Which 16 k of a half group the matrices of lanes 8 · i and on are.
__device__ inline int sixteen_of(int i) { return SCALES_SUMS && W_BITS == 4 ? i % 2 * 2 + i / 2 : i; }

// Position in the ring.
struct Slot {
  int index = 0;
  uint32_t parity = 0;

  __device__ inline void next() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
};

// Stages of a block's work, one after the other.
struct Cursor {
  Parts parts;
  Part part;
  int step;
  bool more;

  __device__ inline explicit Cursor(const Parts& of) : parts(of) { begin(); }
  __device__ inline void begin() {
    more = parts.next(part);
    step = part.from;
  }
  __device__ inline int groups() const { return min(GROUPS, part.to - step); }
  __device__ inline int tokens_loaded() const {
    const int load = tokens_of_load(part.tokens);
    return (part.tokens + load - 1) / load * load;
  }
  __device__ inline void next() {
    step += GROUPS;
    if (step >= part.to) begin();
  }
};

// Weights of a stage, in memory.
struct Weights {
  const unsigned char* begin;
  int bytes, bytes_of_codes;  // the latter: of the same groups
  uint64_t policy;
};

// Scales of a lane's outputs of a part, as they are in memory: nothing waits for them before they are used.
struct Scales {
  half_bits of_features[2];
  float of_tokens[COL_TILES][2];

  __device__ inline void load(const half_bits* sn, const float* sx, const Part& part, int feature, int n, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (feature + 8 * i < n) of_features[i] = load_early(sn + static_cast<long long>(part.expert) * n + feature + 8 * i);
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = j * MMA_TOKENS + lane % 4 * 2 + e;
        if (token < part.tokens) of_tokens[j][e] = load_written(sx + part.first_row + token);
      }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
grouped_few(const __grid_constant__ TensorMap x1, const __grid_constant__ TensorMap x8,
            const __grid_constant__ TensorMap x16, const __grid_constant__ TensorMap x32, const unsigned char* w,
            const half_bits* sn, const float* sx, const int* sizes, half_bits* y, Marked* partial_sums, int launch,
            int experts, int n, int k, int rows, int rows_apart, const unsigned char* x, const int* published, int number) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  int* state = reinterpret_cast<int*>(shared + STATE_AT);  // number of experts with tokens, and of stages loaded early
  Touched* touched = reinterpret_cast<Touched*>(shared + LIST_AT);
  int* read = reinterpret_cast<int*>(touched + experts + 1);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  let_next_kernel_start();
  const Expert of(n, k);
  const auto route = [&] {
    if (warp == 0) {
      while (published != nullptr && load_acquire(published) != number) {
      }
      const int count = list_touched(touched, read, sizes, experts, rows_apart, rows, lane);
      if (lane == 0) state[0] = count;
    }
    __syncthreads();
    return Parts(of, touched, state[0], gridDim.x - 1 - blockIdx.x, gridDim.x);
  };
  if (threadIdx.x == 32) {
    for (int s = 0; s < STAGES; ++s) mbarrier_init(full + s * 8, 1), mbarrier_init(empty + s * 8, WARPS);
    fence_mbarrier_init();
  }
  if (threadIdx.x == WARPS * 32) {
    prefetch_tensor_map(x1), prefetch_tensor_map(x8);
    if constexpr (COL_TILES > 1) prefetch_tensor_map(x16);
    if constexpr (COL_TILES > 2) prefetch_tensor_map(x32);
  }
  Slot slot;
  Parts parts = route();

  // A single token's codes of a stage are one copy. Swizzling would leave the first row of a group as it is, too.
  const int row_stride = (k + 15) / 16 * 16;
  const auto row_bytes = [&](const Cursor& c) { return min(c.groups() * GROUP, row_stride - c.step * GROUP); };
  const auto weights_of = [&](const Cursor& c) {
    const int tiles = of.tiles_of(c.part.row_block), begin = of.bytes_before(c.step) * tiles;
    if (ROW_SCALED && c.step == 0) {  // the scales of the outputs, too
      const half_bits* row = sn + static_cast<long long>(c.part.expert) * n;
      const int feature = c.part.row_block * BLOCK_ROWS;
      prefetch_to_l2(row + feature), prefetch_to_l2(row + min(feature + BLOCK_ROWS, n) - 1);
    }
    return Weights{w + of.begin_of(c.part.expert, c.part.row_block) + begin,
                   of.bytes_before(c.step + c.groups()) * tiles - begin, is_row(c.part) ? row_bytes(c) : c.groups() * c.tokens_loaded() * GROUP,
                   c.part.is_shared ? evict_normal_policy() : evict_first_policy()};
  };
  const auto load_weights = [&](const Weights& from, int index) {
    mbarrier_arrive_expect_tx(full + index * 8, from.bytes + from.bytes_of_codes);
    bulk_load(ring + index * STAGE_BYTES, from.begin, from.bytes, full + index * 8, from.policy);
  };
  const auto load_tokens = [&](const Cursor& c, int index) {
    if (is_row(c.part)) {
      const unsigned char* from = x + static_cast<long long>(c.part.first_row) * row_stride + c.step * GROUP;
      bulk_load(ring + index * STAGE_BYTES + CODES_AT, from, row_bytes(c), full + index * 8, evict_normal_policy());
      return;
    }
    const int load = tokens_of_load(c.part.tokens);
    const TensorMap& map = load == 1 ? x1 : load == 8 ? x8 : load == 16 ? x16 : x32;
    for (int g = 0; g < c.groups(); ++g)
      for (int first = 0; first < c.part.tokens; first += load)
        tma_load_2d(ring + index * STAGE_BYTES + CODES_AT + g * GROUP_CODES_BYTES + first * GROUP, map, (c.step + g) * GROUP,
                    c.part.first_row + first, full + index * 8);
  };
  if (threadIdx.x == WARPS * 32) {
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // weights, then tokens
      Cursor early(parts);
      int loaded = 0;
      if (pass == 1) wait_for_previous_kernel();  // codes may be its output
#pragma unroll 1
      for (; loaded < STAGES && early.more; ++loaded, early.next()) {
        if (pass == 0) load_weights(weights_of(early), loaded);
        else load_tokens(early, loaded);
      }
      state[1] = loaded;
    }
  }
  __syncwarp();
  wait_for_previous_kernel();
  bool differs = false;
#pragma unroll 4
  for (int e = lane; e < experts && published == nullptr; e += 32) differs |= load_fresh(sizes + e) != read[e];
  // Each warp finds out by itself, so that none waits for the producer's requests.
  const bool is_rerouted = __any_sync(0xFFFFFFFFu, differs);
  if (is_rerouted) {
    __syncthreads();
    for (int i = 0; i < state[1]; ++i, slot.next()) {
      mbarrier_wait(full + slot.index * 8, slot.parity);
      __syncwarp();
      if (warp < WARPS && lane == 0) mbarrier_arrive(empty + slot.index * 8);
    }
    __syncthreads();
    parts = route();
  }

  if (warp == WARPS) {
    if (lane == 0) {
      Cursor cursor(parts);
      if (!is_rerouted)
        for (int i = state[1]; i > 0; --i) cursor.next(), slot.next();
      for (; cursor.more; cursor.next(), slot.next()) {
        const Weights weights = weights_of(cursor);
        mbarrier_wait(empty + slot.index * 8, slot.parity ^ 1);
        load_weights(weights, slot.index);
        load_tokens(cursor, slot.index);
      }
    }
    return;
  }

  const int set = warp / BLOCK_TILES, tile = warp % BLOCK_TILES;
  const uint32_t row_codes = CODES_AT + lane % 8 * GROUP;  // swizzled
  const int sixteen = sixteen_of(lane / 8);
  const uint32_t lane_codes[2] = {row_codes + (sixteen ^ (lane % 8)) * 16, row_codes + ((4 + sixteen) ^ (lane % 8)) * 16};
  Part part;
  for (int number = 0; parts.next(part); ++number) {
    const int tiles = of.tiles_of(part.row_block), columns = (part.tokens + MMA_TOKENS - 1) / MMA_TOKENS;
    const int feature = (part.row_block * BLOCK_TILES + tile) * MMA_ROWS + lane / 4;
    const bool has_rows = tile < tiles, is_owner = part.from == 0;
    const LanePlace place(tile, tiles, lane);
    const int codes_stride = is_row(part) ? GROUP : GROUP_CODES_BYTES;
    const uint32_t chunk_bytes = tiles * (WHOLE_TILE_BYTES + TILE_SCALE_BYTES);
    Scales scales;
    if (ROW_SCALED && set == 0 && has_rows && is_owner) scales.load(sn, sx, part, feature, n, lane);
    Sum total[COL_TILES][4] = {};
    for (int step = part.from; step < part.to; step += GROUPS, slot.next()) {
      const int groups = min(GROUPS, part.to - step);
      const uint32_t stage = ring + slot.index * STAGE_BYTES;
      mbarrier_wait(full + slot.index * 8, slot.parity);
      if (has_rows) {
        PackedTile packed[BUFFERS];
        uint32_t b[BUFFERS][MMAS][2];
        const uint32_t codes[2] = {stage + lane_codes[0], stage + lane_codes[1]};
        const auto load_group = [&](int g, int to) {
          packed[to].load(stage + g * chunk_bytes, place, tile, tiles, of.mmas_of(step + g), lane);
          load_codes(b[to], codes, g * codes_stride);
          const int mmas = of.mmas_of(step + g);
          if (ELEMENT == 0 && mmas < MMAS)  // past K a row has any codes
#pragma unroll
            for (int m = 0; m < MMAS; ++m)
#pragma unroll
              for (int half = 0; half < 2; ++half)
                if ((SCALES_SUMS && W_BITS == 4 ? m / 2 * 2 + half : m) >= mmas) b[to][m][half] = 0;
        };
        if (BUFFERS > 1 && set < groups) load_group(set, 0);
#pragma unroll
        for (int i = 0; i < GROUPS / SETS; ++i) {
          const int g = i * SETS + set, at = i % BUFFERS;
          if (g >= groups) continue;
          if constexpr (BUFFERS == 1) load_group(g, 0);
          else if (i + 1 < GROUPS / SETS && g + SETS < groups) load_group(g + SETS, (i + 1) % BUFFERS);
#if W_BITS < 8 && !HALF_SCALES
          if constexpr (SCALES_SUMS) {
            add_scaled(total[0], packed[at], b[at]);
            continue;
          }
#endif
          uint32_t a[MMAS][4];
          packed[at].operands(a);
#pragma unroll
          for (int j = 0; j < COL_TILES; ++j) {
            if (j > 0 && j >= columns) break;
#if HALF_SCALES
            float of_tokens[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int row = part.first_row + min(j * MMA_TOKENS + lane % 4 * 2 + e, part.tokens - 1);
              const uint16_t* of_row = reinterpret_cast<const uint16_t*>(sx) + static_cast<long long>(row) * of.steps;
              of_tokens[e] = half_to_float(static_cast<half_bits>(load_written(of_row + step + g)));
            }
#endif
            if (j > 0) load_codes(b[at], codes, g * GROUP_CODES_BYTES + j * MMA_TOKENS * GROUP);
#if HALF_SCALES
            int sums[4] = {};
#pragma unroll
            for (int m = 0; m < MMAS; ++m) mma_s8_m16n8k32(sums, a[m], b[at][m]);  // past K, codes are zero
            add_scaled(total[j], sums, packed[at].scales, of_tokens);
#else
#pragma unroll
            for (int m = 0; m < MMAS; ++m) multiply(total[j], a[m], b[at][m]);  // past K, codes are zero
#endif
          }
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + slot.index * 8);
    }
    if (!has_rows) continue;
    if constexpr (SETS > 1) {
      float4* sums = reinterpret_cast<float4*>(shared + SUMS_AT + number % 2 * (SETS - 1) * SET_SUMS_BYTES) + tile * COL_TILES * 32 + lane;
      if (set > 0)
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j)
          sums[(set - 1) * (SET_SUMS_BYTES / 16) + j * 32] =
              make_float4(bits_of(total[j][0]), bits_of(total[j][1]), bits_of(total[j][2]), bits_of(total[j][3]));
      named_barrier_sync(1 + tile, SETS * 32);
      if (set > 0) continue;
#pragma unroll
      for (int other = 0; other < SETS - 1; ++other)
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j) {
          const float4 v = sums[other * (SET_SUMS_BYTES / 16) + j * 32];
          total[j][0] += sum_of(v.x), total[j][1] += sum_of(v.y);
          total[j][2] += sum_of(v.z), total[j][3] += sum_of(v.w);
        }
    }
    const auto warp_partials = [&](int block) { return partial_sums + (block * BLOCK_TILES + tile) * MARKS + lane; };
    if (!is_owner) {
#pragma unroll
      for (int j = 0; j < COL_TILES; ++j) {
        if (j >= columns) break;
        Marked* to = warp_partials(parts.block) + j * 64;
        store_marked(to, Marked(bits_of(total[j][0]), bits_of(total[j][1]), launch));
        store_marked(to + 32, Marked(bits_of(total[j][2]), bits_of(total[j][3]), launch));
      }
      continue;
    }
    if (part.to < of.steps)
      for (int other = parts.block + 1; parts.begin_of(other) < part.end; ++other)
#pragma unroll
        for (int j = 0; j < COL_TILES; ++j) {
          if (j >= columns) break;
          const Marked* from = warp_partials(other) + j * 64;
          Marked low, high;
          do {
            low = load_marked(from), high = load_marked(from + 32);
          } while (!low.has(launch) || !high.has(launch));
          total[j][0] += sum_of(low.value(0)), total[j][1] += sum_of(low.value(1));
          total[j][2] += sum_of(high.value(0)), total[j][3] += sum_of(high.value(1));
        }
#pragma unroll
    for (int j = 0; j < COL_TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = j * MMA_TOKENS + lane % 4 * 2 + e % 2;
        if (token >= part.tokens || feature + e / 2 * 8 >= n) continue;
        float value = static_cast<float>(total[j][e]);
        if constexpr (HALF_SCALES) value *= 0.25f;  // operands are four times the codes
        if constexpr (ROW_SCALED) value = value * half_to_float(scales.of_features[e / 2]) * scales.of_tokens[j][e % 2];
        y[static_cast<long long>(part.first_row + token) * n + feature + e / 2 * 8] = output_bits(value);
      }
  }
}
