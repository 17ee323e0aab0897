// flexq_imma_bulk.cu: Y[M,N] = X[M,K] . W[N,K]^T on Hopper's asynchronous int8 tensor cores, for the most
// tokens. Operands are those of flexq_imma_wgmma.cu.
//
// One warp asks the copy engine for weights, tokens and scales of one group of k after the other; it is
// ahead by the stages of the block's ring. WARPGROUPS others multiply, each 64 rows with all TOKENS of the
// block: its weights are widened in registers, its tokens come in granules, and while the tensor cores are at
// a granule of one warpgroup the next one converts and scales its sums. Named barriers keep their order.
// SHARERS neighbouring blocks, a cluster, have the same tokens, of which each copies a part to all.
// K_SPLIT neighbouring blocks, a cluster, take the groups in turn and add in a fixed order.
#if !defined(WARPGROUPS) || !defined(TOKENS_OF_BLOCK) || !defined(STAGES) || !defined(SHARERS) || !defined(K_SPLIT)
#error "WARPGROUPS, TOKENS_OF_BLOCK, STAGES, SHARERS and K_SPLIT choose the kernel"
#endif
#ifndef GRANULE_TOKENS
#define GRANULE_TOKENS 128
#endif
#ifndef ORDERED
#define ORDERED 1
#endif
constexpr int THREADS = WARPGROUPS * 128;  // that multiply and write
constexpr int TILES = WARPGROUPS * 4;
constexpr int TOKENS = TOKENS_OF_BLOCK;
#include "bulk_copy.cuh"
#include "imma_block.cuh"

constexpr int GRANULE = GRANULE_TOKENS, GRANULES = TOKENS / GRANULE;
static_assert(!DUAL_GRAINED, "sums of a group are converted");
static_assert(SHARERS == 1 || K_SPLIT == 1, "blocks of a cluster share tokens or outputs");
constexpr int CLUSTER = SHARERS * K_SPLIT;
constexpr int BLOCK_WARPS = THREADS / 32 + 4;
// Registers of a thread that multiplies and of one that does not; all of them are an SM's.
constexpr int MORE_REGISTERS = WARPGROUPS == 2 ? 232 : 152, FEWER_REGISTERS = WARPGROUPS == 2 ? 40 : 56;

constexpr int WARP_OUT_BYTES = 16 * 32 * 4;  // 16 rows of 64 tokens as halves
constexpr int OUT_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = OUT_AT + (K_SPLIT == 1 ? THREADS / 32 * WARP_OUT_BYTES : 0);

struct Stage {
  int slot = 0;
  uint32_t parity = 0;

  __device__ inline void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// What all roles know of the work.
struct Grid {
  int m, n, groups, steps, row_tiles, token_blocks, outputs;  // outputs: of a cluster, one after the other
  int first, stride;

  __device__ Grid(int m_, int n_, int k)
      : m(m_), n(n_), groups((k + GROUP - 1) / GROUP), steps(tiles_along(groups)),
        row_tiles((n + MMA_ROWS - 1) / MMA_ROWS), token_blocks((m + TOKENS - 1) / TOKENS) {
    const int row_blocks = (row_tiles + TILES - 1) / TILES;
    outputs = (row_blocks + SHARERS - 1) / SHARERS * token_blocks;
    first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  }
  __device__ inline int first_token(int output) const { return output % token_blocks * TOKENS; }
  __device__ inline int first_tile(int output, int rank) const {
    return (output / token_blocks * SHARERS + (SHARERS > 1 ? rank : 0)) * TILES;
  }
};

// What the copying thread does for a stage. Few large requests: the copy engine takes a hundred cycles for one.
struct Loader {
  const Grid& grid;
  const TensorMap &w, &sw, &x;
  const float* sx;
  uint32_t ring, full;
  int rank, m_padded;

  __device__ inline int token_scale_bytes(int first_token) const {
    return A_GROUPED ? min(TOKENS, m_padded - first_token) * 4 : 0;
  }

  __device__ inline void load_weights(int slot, int output, int step) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    arrive_expecting(barrier, TILES * (TILE_BYTES + SCALE_BYTES) + TOKENS * GROUP +
                                  token_scale_bytes(grid.first_token(output)));
    const int first_tile = grid.first_tile(output, rank);  // past the end there are zeros
    copy_box(stage + TILES_AT, w, step * (TILE_BYTES / 8), first_tile, barrier);
    copy_box(stage + SCALES_AT, sw, step * (SCALE_BYTES / 8), first_tile, barrier);
  }

  __device__ inline void load_tokens(int slot, int output, int step) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int group = group_of(step, grid.groups), first_token = grid.first_token(output);
    if constexpr (SHARERS == 1) {
      copy_box(stage, x, group * GROUP, first_token, barrier);
    } else {
      constexpr int SHARE = TOKENS / SHARERS;
      copy_box_to_all(stage + rank * SHARE * GROUP, x, group * GROUP, first_token + rank * SHARE, barrier,
                      (1 << SHARERS) - 1);
    }
    if constexpr (A_GROUPED)
      copy_bytes(stage + TOKEN_SCALES_AT, sx + static_cast<int64_t>(group) * m_padded + first_token,
                 token_scale_bytes(first_token), barrier);
  }
};

struct Sums {
  int of[GRANULE / 2];

  __device__ inline void touch() {
#pragma unroll
    for (int i = 0; i < GRANULE / 2; ++i) asm volatile("" : "+r"(of[i])::"memory");
  }
};

struct Weights {
  uint32_t a[MMAS][4];
  float top, bottom;  // scales of rows lane/4 and lane/4 + 8
};

__device__ inline Weights widened(uint32_t stage, int tile, int lane, bool upper_tail) {
  const uint32_t scales = load_shared_word(stage + SCALES_AT + tile * SCALE_BYTES + lane / 4 * 4);
  const WeightTile packed(stage + TILES_AT + tile * TILE_BYTES, scales, lane, upper_tail);
  Weights weights;
#pragma unroll
  for (int o = 0; o < OPERAND_WORDS; ++o) weights.a[o / 4][o % 4] = packed.operand(o);
  weights.top = packed.scale[0], weights.bottom = packed.scale[1];
  return weights;
}

__device__ inline void multiply(Sums& sums, const uint32_t (&a)[MMAS][4], uint32_t tokens) {
  sums.touch();
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i)
    wgmma_s8_k32(sums.of, a[i], swizzled_operand(tokens + i * MMA_K), i > 0);
  wgmma_commit();
}

__device__ inline void add_scaled(float (&total)[GRANULE / 2], const Sums& sums, float top, float bottom,
                                  uint32_t token_scales, int lane) {
#pragma unroll
  for (int j = 0; j < GRANULE / MMA_TOKENS; ++j) {
    float* t = total + 4 * j;
    const int* s = sums.of + 4 * j;
#if A_GROUPED
    const float2 of_token = load_shared_pair(token_scales + (j * MMA_TOKENS + lane % 4 * 2) * 4);
    t[0] = fmaf(static_cast<float>(s[0]) * top, of_token.x, t[0]);
    t[1] = fmaf(static_cast<float>(s[1]) * top, of_token.y, t[1]);
    t[2] = fmaf(static_cast<float>(s[2]) * bottom, of_token.x, t[2]);
    t[3] = fmaf(static_cast<float>(s[3]) * bottom, of_token.y, t[3]);
#else
    t[0] = fmaf(static_cast<float>(s[0]), top, t[0]), t[1] = fmaf(static_cast<float>(s[1]), top, t[1]);
    t[2] = fmaf(static_cast<float>(s[2]), bottom, t[2]), t[3] = fmaf(static_cast<float>(s[3]), bottom, t[3]);
#endif
  }
}

// A warp's 16 rows of all tokens, through its own shared memory, so that a token's 16 are written at once.
__device__ inline void write_warp(const float (&total)[GRANULES][GRANULE / 2], uint32_t out, const half_bits* bias,
                                  half_bits* y, const Grid& grid, int first_feature, int first_token,
                                  [[maybe_unused]] const float* sx, const half_bits* sn) {
  const int lane = threadIdx.x % 32;
  const bool wide = grid.n % 8 == 0 && reinterpret_cast<uint64_t>(y) % 16 == 0;
  float b[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    b[i] = bias == nullptr ? 0.0f : half_to_float(bias[min(first_feature + lane / 4 + 8 * i, grid.n - 1)]);
#pragma unroll
  for (int c = 0; c < TOKENS / 64; ++c) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // 16 tokens
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows 8 * (i % 2), tokens 8 * (i / 2)
        const int tile = c * 8 + q * 2 + i / 2, token = first_token + tile * 8 + lane % 4 * 2;
        const float* t = &total[tile * 4 / (GRANULE / 2)][tile * 4 % (GRANULE / 2) + i % 2 * 2];
        half_bits h[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int inside = min(token + e, grid.m - 1);
          h[e] = float_to_half(scaled_output(t[e], inside, 0, sx, sn) + b[i % 2]);
        }
        words[i] = h[0] | static_cast<uint32_t>(h[1]) << 16;
      }
      const uint32_t to = out + q * 512 + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
      store_transposed(to, words);
    }
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int token = first_token + c * 64 + q * 16 + lane / 2, feature = first_feature + lane % 2 * 8;
      const uint4 words = load_shared(out + q * 512 + lane * 16);
      if (token < grid.m && feature < grid.n) {
        half_bits* to = y + static_cast<long long>(token) * grid.n + feature;
        if (wide) {
          *reinterpret_cast<uint4*>(to) = words;
        } else {
          const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (feature + i < grid.n) to[i] = static_cast<half_bits>(word[i / 2] >> (i % 2 * 16));
        }
      }
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, 1)
flexq_imma_bulk(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap sw,
                const __grid_constant__ TensorMap x, const float* sx, const half_bits* bias, half_bits* y, int m, int n, int k,
                [[maybe_unused]] const half_bits* sn) {
  extern __shared__ __align__(SWIZZLE_BYTES) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  const int rank = static_cast<int>(blockIdx.x) % CLUSTER;
  const int split = K_SPLIT > 1 ? rank : 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      init_barrier(full + s * 8, 1);
      init_barrier(empty + s * 8, SHARERS * THREADS / 32);
    }
    barriers_are_initialized();
  }
  if constexpr (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  if (warp >= THREADS / 32) {
    registers_down<FEWER_REGISTERS>();
    if (threadIdx.x == THREADS) {
      const Grid grid(m, n, k);
      const Loader loader{grid, w, sw, x, sx, ring, full, rank, (m + MMA_TOKENS - 1) / MMA_TOKENS * MMA_TOKENS};
      Stage stage;
      bool waits = true;  // weights are constant; activations may be what the previous kernel just wrote
      for (int output = grid.first; output < grid.outputs; output += grid.stride)
        for (int step = split; step < grid.steps; step += K_SPLIT) {
          wait_for_phase(empty + stage.slot * 8, stage.parity ^ 1);
          loader.load_weights(stage.slot, output, step);
          if (waits) wait_for_previous_kernel(), waits = false;
          loader.load_tokens(stage.slot, output, step);
          stage.next();
        }
    }
    __syncwarp();
    if constexpr (K_SPLIT > 1) cluster_sync(), cluster_sync();
  } else {
    registers_up<MORE_REGISTERS>();
    const Grid grid(m, n, k);
    const int warpgroup = warp / 4;
    Stage stage;
    if (ORDERED && warpgroup == WARPGROUPS - 1) arrive_at_named(1, 256);
    for (int output = grid.first; output < grid.outputs; output += grid.stride) {
      const int first_token = grid.first_token(output), first_tile = grid.first_tile(output, rank);
      float total[GRANULES][GRANULE / 2] = {};
      Weights weights;
      if (split < grid.steps) {
        wait_for_phase(full + stage.slot * 8, stage.parity);
        weights = widened(ring + stage.slot * STAGE_BYTES, warp, lane, split == grid.groups - 1);
      }
      for (int step = split; step < grid.steps; step += K_SPLIT) {
        const uint32_t at = ring + stage.slot * STAGE_BYTES, done = empty + stage.slot * 8;
        const float top = weights.top, bottom = weights.bottom;
        const bool more = step + K_SPLIT < grid.steps;
        Stage next = stage;
        next.next();
#pragma unroll
        for (int g = 0; g < GRANULES; ++g) {
          Sums sums;
          if (g == GRANULES - 1 && more) wait_for_phase(full + next.slot * 8, next.parity);
          if (ORDERED) wait_at_named(1 + warpgroup, 256);
          multiply(sums, weights.a, at + g * GRANULE * GROUP);
          if (ORDERED) arrive_at_named(1 + (warpgroup + 1) % WARPGROUPS, 256);
          wgmma_wait<0>();
          sums.touch();
          if (g == GRANULES - 1)  // the next group's, between the conversions; after the last group any
            weights = widened(more ? ring + next.slot * STAGE_BYTES : at, warp, lane,
                              step + K_SPLIT == grid.groups - 1);
          add_scaled(total[g], sums, top, bottom, at + TOKEN_SCALES_AT + g * GRANULE * 4, lane);
        }
        __syncwarp();
        if constexpr (SHARERS > 1) {
          if (lane < SHARERS) arrive_at(done, lane);
        } else {
          if (lane == 0) arrive(done);
        }
        stage = next;
      }
      if constexpr (K_SPLIT == 1) {
        write_warp(total, ring + OUT_AT + warp * WARP_OUT_BYTES, bias, y, grid, (first_tile + warp) * MMA_ROWS,
                   first_token, sx, sn);
      } else {
        float* out = reinterpret_cast<float*>(shared);
        wait_at_named(7, THREADS);  // nobody reads the last stage
#pragma unroll
        for (int g = 0; g < GRANULES; ++g)
#pragma unroll
          for (int i = 0; i < GRANULE / 2; ++i) {
            const int token = g * GRANULE + i / 4 * MMA_TOKENS + lane % 4 * 2 + i % 2;
            out[token * OUT_STRIDE + warp * MMA_ROWS + lane / 4 + i % 4 / 2 * 8] = total[g][i];
          }
        write_out(out, bias, y, m, n, first_tile, first_token, rank, sx, sn);
      }
    }
    if (ORDERED && warpgroup == 0) wait_at_named(1, 256);  // what the last one arrived at
  }
  if constexpr (SHARERS > 1) cluster_sync();  // nobody's barriers go while another arrives at them
}
