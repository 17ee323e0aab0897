// imma/group_gemm_cluster.cu: Y[M,N] = X[M,K] . W[N,K]^T by Hopper's warpgroup MMA for some tens of tokens, where
// reading weights takes about as long as multiplying. Operands are those of imma/group_gemm_wgmma.cu.
//
// One thread of the first warp loads a group's weights, tokens and scales by TMA into a ring of stages in shared
// memory. ROW_WARPGROUPS warpgroups multiply a stage, each 64 rows with all TOKENS of the block; K_WARPGROUPS sets of
// them take the stages in turn. No barrier is between groups: a warpgroup that is done with a stage says so, and
// while it converts, others multiply. K_SPLIT neighbouring blocks, a cluster, take the groups of k in turn. Partial
// sums are added once, through distributed shared memory, in a fixed order: results are deterministic.
// RESIDENT blocks fit on an SM, so that the next kernel's load their first weights beside this one's last.
//
// Sums of a group begin at the bits of a float in whose binade sums up to 2^22 stay (block_tile.cuh): they need no
// conversion, and an FFMA begins them again, which is issued in every cycle; a conversion in every second.
// DUAL_GRAINED: integers add up in the tensor cores' accumulators over all of K.
#if !defined(ROW_WARPGROUPS) || !defined(K_WARPGROUPS) || !defined(TOKENS) || !defined(STAGES) || \
    !defined(K_SPLIT) || !defined(RESIDENT)
#error "ROW_WARPGROUPS, K_WARPGROUPS, TOKENS, STAGES, K_SPLIT and RESIDENT choose the kernel"
#endif
constexpr int TILES = ROW_WARPGROUPS * 4;
constexpr int THREADS = ROW_WARPGROUPS * K_WARPGROUPS * 128;
constexpr int OUT_PARTS = K_WARPGROUPS;
#include "imma/block_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int LAG = 2;  // rounds of a set until the stages of one are requested again
static_assert(STAGES > LAG * K_WARPGROUPS, "what a set waits for has been requested");
constexpr int GRANULE = 64, GRANULES = TOKENS / GRANULE;  // tokens of one MMA
static_assert(TOKENS % GRANULE == 0, "whole granules");
constexpr int LOADED_BYTES = TILES * (TILE_BYTES + SCALE_BYTES) + TOKENS * GROUP + TOKEN_SCALES * 4;  // of a stage
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;

// A place in the ring that goes round it, to every BY-th stage.
template <int BY>
struct Slot {
  int index;
  uint32_t parity = 0;

  __device__ inline void next() {
    index += BY;
    if (index >= STAGES) index -= STAGES, parity ^= 1;
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
#if !DUAL_GRAINED
  float scale[2];  // of rows lane/4 and lane/4 + 8
#endif

  // Keeps their registers from being written before.
  __device__ inline void touch() {
#pragma unroll
    for (int o = 0; o < OPERAND_WORDS; ++o) asm volatile("" : "+r"(a[o / 4][o % 4]));
  }
};

__device__ inline void widen(Weights& weights, uint32_t stage, int tile, int lane, bool upper_tail) {
  const uint32_t scales = load_shared_word(stage + SCALES_AT + tile * SCALE_BYTES + lane / 4 * 4);
  const WeightTile packed(stage + TILES_AT + tile * TILE_BYTES, scales, lane, upper_tail);
#pragma unroll
  for (int o = 0; o < OPERAND_WORDS; ++o) weights.a[o / 4][o % 4] = packed.operand(o);
#if !DUAL_GRAINED
  weights.scale[0] = packed.scale[0], weights.scale[1] = packed.scale[1];
#endif
}

__device__ inline void multiply(Sums& sums, Weights& weights, uint32_t tokens) {
  sums.touch();
  weights.touch();
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i) wgmma_s8_k32(sums.of, weights.a[i], swizzled_descriptor(tokens + i * MMA_K), true);
  wgmma_commit();
}

#if !DUAL_GRAINED
// The product of a whole number and a half, rounded once: the same bits as by a conversion.
__device__ inline void add_scaled(float (&total)[GRANULE / 2], Sums& sums, const Weights& weights, uint32_t token_scales,
                                  int lane) {
  const float bias[2] = {-BIAS * weights.scale[0], -BIAS * weights.scale[1]};  // exact: scales are halves
#pragma unroll
  for (int j = 0; j < GRANULE / MMA_TOKENS; ++j) {
    float2 of_token;
    if constexpr (A_GROUPED) of_token = load_shared_pair(token_scales + (j * MMA_TOKENS + lane % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = __int_as_float(sums.of[4 * j + i]);
      const float scaled = fmaf(sum, weights.scale[i / 2], bias[i / 2]);
      float& t = total[4 * j + i];
      if constexpr (A_GROUPED) t = fmaf(scaled, i % 2 == 0 ? of_token.x : of_token.y, t);
      else t += scaled;
      sums.of[4 * j + i] = __float_as_int(fmaf(sum, 0.0f, BIAS));
    }
  }
}
#endif

// Requests of a stage, by a thread that multiplies as well: a warp of its own would take as many registers as each of
// the others, and one scheduler would have one more.
struct Producer {
  const TensorMap &w, &sw, &x, &sx;
  uint32_t ring, full;
  int rank, groups, first_tile, first_token;

  __device__ inline void load_weights(int slot, int number) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int step = rank + number * K_SPLIT;
    mbarrier_arrive_expect_tx(barrier, LOADED_BYTES);
    tma_load_2d(stage + TILES_AT, w, step * (TILE_BYTES / 8), first_tile, barrier);  // past the end there are zeros
    tma_load_2d(stage + SCALES_AT, sw, step * (SCALE_BYTES / 8), first_tile, barrier);
  }

  __device__ inline void load_tokens(int slot, int number) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int group = group_of(rank + number * K_SPLIT, groups);
    tma_load_2d(stage, x, group * GROUP, first_token, barrier);
    if constexpr (A_GROUPED) tma_load_2d(stage + TOKEN_SCALES_AT, sx, first_token / 2, group, barrier);  // of two each
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
flexq_imma_cluster(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap sw,
                   const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap sx_of_groups,
                   const float* sx, const half_bits* bias, half_bits* y, int m, int n, int k,
                   [[maybe_unused]] const half_bits* sn) {
  extern __shared__ __align__(SWIZZLE_BYTES) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT, token_block = static_cast<int>(blockIdx.x) / K_SPLIT;
  const int groups = (k + GROUP - 1) / GROUP, steps = tiles_along(groups);
  const int first_tile = blockIdx.y * TILES, first_token = token_block * TOKENS;
  const int mine = (steps - rank + K_SPLIT - 1) / K_SPLIT;  // steps of this block
  const Producer producer{w, sw, x, sx_of_groups, ring, full, rank, groups, first_tile, first_token};

  let_next_kernel_start();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(w), prefetch_tensor_map(sw), prefetch_tensor_map(x);
    if constexpr (A_GROUPED) prefetch_tensor_map(sx_of_groups);
    for (int s = 0; s < STAGES; ++s) mbarrier_init(full + s * 8, 1), mbarrier_init(empty + s * 8, TILES);
    fence_mbarrier_init();
    for (int i = 0; i < min(STAGES, mine); ++i) producer.load_weights(i, i);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    wait_for_previous_kernel();  // weights are constant; activations may be what it just wrote
    for (int i = 0; i < min(STAGES, mine); ++i) producer.load_tokens(i, i);
  }
  __syncwarp();

  const int tile = warp % TILES, set = warp / TILES;
#if !DUAL_GRAINED
  float total[GRANULES][GRANULE / 2] = {};
#endif
  Sums sums[GRANULES];
#pragma unroll
  for (int g = 0; g < GRANULES; ++g)
#pragma unroll
    for (int i = 0; i < GRANULE / 2; ++i) sums[g].of[i] = DUAL_GRAINED ? 0 : BIAS_BITS;
  Slot<K_WARPGROUPS> slot{set};
  Slot<1> freed{0};
  for (int i = set; i < mine; i += K_WARPGROUPS, slot.next()) {
    const uint32_t stage = ring + slot.index * STAGE_BYTES;
    mbarrier_wait(full + slot.index * 8, slot.parity);
    Weights weights;
    widen(weights, stage, tile, lane, rank + i * K_SPLIT == groups - 1);
#pragma unroll
    for (int g = 0; g < GRANULES; ++g) multiply(sums[g], weights, stage + g * GRANULE * GROUP);
    // Meanwhile, the stages of LAG rounds ago: mostly all have left them by now.
    if (i >= LAG * K_WARPGROUPS && warp == 0) {
#pragma unroll
      for (int q = 0; q < K_WARPGROUPS; ++q, freed.next()) {
        const int number = i - LAG * K_WARPGROUPS + q + STAGES;
        if (number < mine && lane == 0) {
          mbarrier_wait(empty + freed.index * 8, freed.parity);
          producer.load_weights(freed.index, number);
          producer.load_tokens(freed.index, number);
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int g = 0; g < GRANULES; ++g) {
      if (g + 1 < GRANULES) wgmma_wait<GRANULES - 1>();
      else wgmma_wait<0>();
      sums[g].touch();
      if (g + 1 == GRANULES) weights.touch();
#if !DUAL_GRAINED
      add_scaled(total[g], sums[g], weights, stage + TOKEN_SCALES_AT + g * GRANULE * 4, lane);
#endif
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + slot.index * 8);
  }
  __syncthreads();  // everybody has left the ring
  // [part][token][row], so that a token's outputs are written side by side.
  float* out = reinterpret_cast<float*>(shared) + set * TOKENS * OUT_STRIDE;
#pragma unroll
  for (int g = 0; g < GRANULES; ++g)
#pragma unroll
    for (int i = 0; i < GRANULE / 2; ++i) {
      const int token = g * GRANULE + i / 4 * MMA_TOKENS + lane % 4 * 2 + i % 2;
#if DUAL_GRAINED
      const Sum sum = sums[g].of[i];
#else
      const Sum sum = total[g][i];
#endif
      out[token * OUT_STRIDE + tile * MMA_ROWS + lane / 4 + i % 4 / 2 * 8] = bits_of(sum);
    }
  write_out(reinterpret_cast<const float*>(shared), bias, y, m, n, first_tile, first_token, rank, sx, sn);
}
