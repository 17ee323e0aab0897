// imma/group_gemm_wgmma.cu: Y[M,N] = X[M,K] . W[N,K]^T by warpgroup MMA (WGMMA, int8), 6- or 4-bit weights, many
// tokens. Weights are those of imma/group_gemm.cu, so one packed weight serves decode and prefill; the k of tokens
// are in the order of imma/mma_order.cuh.
//
// A warpgroup multiplies 64 rows, dequantized in registers, with all TOKENS of the block, in granules of 64 tokens.
// During the WGMMAs of one granule, the warps convert and scale the sums of the previous one. During those of a
// group's last granule, they wait for the next group's stage (OVERLAPS).
// WHOLE_K: sums are accumulated over all of K by the tensor cores; during the WGMMAs of one group, the
// warps dequantize the next group's weights.
// The K_SPLIT blocks of a cluster take the groups round-robin; partial sums are reduced in a fixed order: results
// are deterministic.
#if !defined(WARPGROUPS) || !defined(GRANULES) || !defined(STAGES) || !defined(K_SPLIT)
#error "define WARPGROUPS, GRANULES, STAGES and K_SPLIT"
#endif
constexpr int THREADS = WARPGROUPS * 128;
constexpr int TILES = WARPGROUPS * 4;
constexpr int TOKENS = GRANULES * 64;
#include "imma/block_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

constexpr int GRANULE = 64;
// Begin a group during the WGMMAs of the previous one. It costs two stages and registers. Without it several small
// blocks fit on an SM and overlap each other.
constexpr bool OVERLAPS = WHOLE_K || (GRANULES > 1 && STAGES > 3);
constexpr int AHEAD = OVERLAPS ? STAGES - 2 : STAGES - 1;
static_assert(AHEAD >= 1, "too few STAGES: besides one multiplied stage, with OVERLAPS two, at least one must load");

// A lane's accumulators of 64 rows and 64 tokens, as those of eight adjacent mma.m16n8k32.
struct Sums {
  WgmmaSum values[GRANULE / 2];

  __device__ inline WgmmaSum operator[](int i) const { return values[i]; }

  // Keeps the compiler from moving accesses to the sums across it.
  __device__ inline void fence_registers() {
#pragma unroll
    for (int i = 0; i < GRANULE / 2; ++i) asm volatile("" : WGMMA_SUM(values[i])::"memory");
  }
};

struct Weights {
  uint32_t a[MMAS][4];
#if !WHOLE_K
  float top, bottom;  // scales of rows lane/4 and lane/4 + 8
#endif
};

__device__ inline WeightTile packed_weights(uint32_t stage, int tile, int lane, bool upper_tail) {
  const uint32_t scales = load_lane_scales(stage + SCALES_AT + tile * SCALE_BYTES, lane);
  return WeightTile(stage + TILES_AT + tile * TILE_BYTES, scales, lane, upper_tail);
}

__device__ inline void widen(Weights& weights, const WeightTile& packed) {
  packed.widen(weights.a);
#if !WHOLE_K
  weights.top = packed.scale[0], weights.bottom = packed.scale[1];
#endif
}

#if WHOLE_K
// Issue the WGMMAs of a group: 64 rows, 16 of them in this warp, and all tokens.
__device__ inline void multiply(Sums (&total)[GRANULES], const Weights& weights, uint32_t tokens) {
  const uint64_t first = swizzled_descriptor(tokens);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i)
#pragma unroll
    for (int g = 0; g < GRANULES; ++g)
      wgmma_k32(total[g].values, weights.a[i],
                         advance_descriptor(first, g * GRANULE * GROUP + i * MMA_K), true);
  wgmma_commit();
}
#else
// Issue the WGMMAs of a granule: 64 rows, 16 of them in this warp, and the 64 tokens at `tokens`.
__device__ inline void multiply(Sums& sums, const Weights& weights, uint32_t tokens) {
  const uint64_t first = swizzled_descriptor(tokens);
  sums.fence_registers();
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i)
    wgmma_k32(sums.values, weights.a[i], advance_descriptor(first, i * MMA_K), i > 0);
  wgmma_commit();
}

__device__ inline void add_scaled(float (&total)[GRANULE / 2], Sums& sums, float top, float bottom,
                                  uint32_t token_scales, int lane) {
  sums.fence_registers();
#pragma unroll
  for (int j = 0; j < GRANULE / MMA_TOKENS; ++j) {
    float* t = total + 4 * j;
    const int* s = sums.values + 4 * j;
#if A_GROUPED
    const float2 token_scale = load_shared_pair(token_scales + (j * MMA_TOKENS + lane % 4 * 2) * 4);
    t[0] = fmaf(static_cast<float>(s[0]) * top, token_scale.x, t[0]);
    t[1] = fmaf(static_cast<float>(s[1]) * top, token_scale.y, t[1]);
    t[2] = fmaf(static_cast<float>(s[2]) * bottom, token_scale.x, t[2]);
    t[3] = fmaf(static_cast<float>(s[3]) * bottom, token_scale.y, t[3]);
#else
    t[0] = fmaf(static_cast<float>(s[0]), top, t[0]), t[1] = fmaf(static_cast<float>(s[1]), top, t[1]);
    t[2] = fmaf(static_cast<float>(s[2]), bottom, t[2]), t[3] = fmaf(static_cast<float>(s[3]), bottom, t[3]);
#endif
  }
}
#endif

// Recomputed at every use, to save registers.
__device__ inline int lane_of_warp() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_of_block() { return static_cast<int>(threadIdx.x) / 32; }

// The mainloop over groups. It has no branches: if a branch decides which WGMMAs are in flight, the compiler
// serializes them.
struct Pipeline {
  const Copies& copies;
  const unsigned char *w, *sw;
  const int8_t* x;
  const float* sx;
  uint32_t ring;
  int steps;
  int slot = 0;

  // Wait for a group's stage and start to load another one.
  __device__ __forceinline__ uint32_t next_stage(int step) {
    cp_async_wait<AHEAD - 1>();
    fence_async_proxy();  // WGMMAs read this thread's copies
    __syncthreads();
    const int ahead = step + AHEAD * K_SPLIT, ahead_slot = slot + AHEAD;
    const uint32_t ahead_stage =
        ring + (ahead_slot < STAGES ? ahead_slot : ahead_slot - STAGES) * STAGE_BYTES;
    if (ahead < steps) {
      copies.load_weights(ahead_stage, w, sw, ahead);
      copies.load_tokens(ahead_stage, x, sx, ahead);
    }
    cp_async_commit();
    const uint32_t stage = ring + slot * STAGE_BYTES;
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    return stage;
  }

  __device__ __forceinline__ WeightTile packed(uint32_t stage, int step) const {
    return packed_weights(stage, warp_of_block(), lane_of_warp(), step == copies.groups - 1);
  }

#if WHOLE_K
  __device__ __forceinline__ void add_group(Sums (&total)[GRANULES], Weights& weights, int step) {
    const uint32_t stage = next_stage(step);
    widen(weights, packed(stage, step));
    multiply(total, weights, stage);
    wgmma_wait<1>();  // the previous group is complete: its stage and weights may be overwritten
  }
#else
  // Wait for a group's stage and issue the WGMMAs of its first granule.
  __device__ __forceinline__ uint32_t begin_group(Weights& weights, Sums& sums, int step) {
    const uint32_t stage = next_stage(step);
    widen(weights, packed(stage, step));
    multiply(sums, weights, stage);
    return stage;
  }

  // Finish a group that begin_group began. Unless it is the LAST, begin the next group too, and return its stage.
  // FIRST: the buffer of the first granule's sums.
  template <int FIRST, bool LAST>
  __device__ __forceinline__ uint32_t finish_group(float (&total)[GRANULES][GRANULE / 2], Weights& weights,
                                                   Sums (&sums)[2], uint32_t stage, int step) {
    uint32_t next = 0;
    const float top = weights.top, bottom = weights.bottom;
#pragma unroll
    for (int g = 0; g < GRANULES; ++g) {
      const int buffer = (FIRST + g) % 2;
      if (g + 1 < GRANULES) {
        multiply(sums[1 - buffer], weights, stage + (g + 1) * GRANULE * GROUP);
        wgmma_wait<1>();
      } else if constexpr (LAST) {
        wgmma_wait<0>();
      } else {
        next = next_stage(step + K_SPLIT);
        wgmma_wait<0>();  // no WGMMA still reads the weights that are overwritten
        widen(weights, packed(next, step + K_SPLIT));
        multiply(sums[1 - buffer], weights, next);
      }
      add_scaled(total[g], sums[buffer], top, bottom, stage + TOKEN_SCALES_AT + g * GRANULE * 4, lane_of_warp());
    }
    return next;
  }
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS)
flexq_imma_wgmma(const unsigned char* w, const unsigned char* sw, const int8_t* x, const float* sx,
                 const half_bits* bias, half_bits* y, int m, int n, int k,
                 [[maybe_unused]] const FeatureScale* sn) {
  extern __shared__ __align__(SWIZZLE_BYTES) unsigned char shared[];
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT;
  const uint32_t ring = shared_address(shared);
  const int groups = (k + GROUP - 1) / GROUP, steps = tiles_along(groups);
  const int first_tile = blockIdx.y * TILES;
  const int first_token = static_cast<int>(blockIdx.x) / K_SPLIT * TOKENS;
  const Copies copies(m, groups, (n + MMA_ROWS - 1) / MMA_ROWS, first_tile, first_token);

  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
    const int step = rank + s * K_SPLIT;
    if (step < steps) copies.load_weights(ring + s * STAGE_BYTES, w, sw, step);
  }
  wait_for_previous_kernel();  // weights are constant, activations may be its output
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
    const int step = rank + s * K_SPLIT;
    if (step < steps) copies.load_tokens(ring + s * STAGE_BYTES, x, sx, step);
    cp_async_commit();
  }

  Pipeline pipeline{copies, w, sw, x, sx, ring, steps};
#if WHOLE_K
  Sums total[GRANULES] = {};
  Weights weights[2];  // one is multiplied while the other is dequantized
  int step = rank;
  for (; step + K_SPLIT < steps; step += 2 * K_SPLIT) {
    pipeline.add_group(total, weights[0], step);
    pipeline.add_group(total, weights[1], step + K_SPLIT);
  }
  if (step < steps) pipeline.add_group(total, weights[0], step);
  wgmma_wait<0>();
#pragma unroll
  for (int g = 0; g < GRANULES; ++g) total[g].fence_registers();
#else
  float total[GRANULES][GRANULE / 2] = {};
  Weights weights;
  Sums sums[2];  // one is accumulated while the other is scaled
  int step = rank;
  if constexpr (!OVERLAPS) {
    for (; step < steps; step += K_SPLIT) {
      const uint32_t stage = pipeline.begin_group(weights, sums[0], step);
      pipeline.finish_group<0, true>(total, weights, sums, stage, step);
    }
  } else if (step < steps) {
    constexpr int ODD = GRANULES % 2;
    uint32_t stage = pipeline.begin_group(weights, sums[0], step);
    for (; step + 2 * K_SPLIT < steps; step += 2 * K_SPLIT) {
      stage = pipeline.finish_group<0, false>(total, weights, sums, stage, step);
      stage = pipeline.finish_group<ODD, false>(total, weights, sums, stage, step + K_SPLIT);
    }
    if (step + K_SPLIT < steps) {
      stage = pipeline.finish_group<0, false>(total, weights, sums, stage, step);
      pipeline.finish_group<ODD, true>(total, weights, sums, stage, step + K_SPLIT);
    } else {
      pipeline.finish_group<0, true>(total, weights, sums, stage, step);
    }
  }
#endif

  // Through shared memory, [token][row], so that a token's outputs are written contiguously.
  cp_async_wait<0>();
  __syncthreads();
  float* out = reinterpret_cast<float*>(shared);
  const int lane = lane_of_warp(), warp = warp_of_block();
#pragma unroll
  for (int g = 0; g < GRANULES; ++g)
#pragma unroll
    for (int i = 0; i < GRANULE / 2; ++i) {
      const int token = g * GRANULE + i / 4 * MMA_TOKENS + lane % 4 * 2 + i % 2;
      out[token * OUT_STRIDE + warp * MMA_ROWS + lane / 4 + i % 4 / 2 * 8] =
          bits_of(total[g][i]);
    }
  write_out(out, bias, y, m, n, first_tile, first_token, rank, sx, sn);
}
