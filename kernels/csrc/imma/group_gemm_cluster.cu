// imma/group_gemm_cluster.cu: Y[M,N] = X[M,K] . W[N,K]^T by Hopper's warpgroup MMA for 17 to 128 tokens, where
// reading weights takes about as long as multiplying. Operands are those of imma/group_gemm_wgmma.cu.
//
// One thread loads a group's weights, tokens and scales by TMA into a ring of stages in shared memory. ROW_WARPGROUPS
// warpgroups multiply a stage, each 64 rows with all TOKENS of the block; K_WARPGROUPS sets of them take the stages in
// turn. No barrier is between groups: a warpgroup that is done with a stage says so, and while it converts, others
// multiply. K_SPLIT neighbouring blocks, a cluster, take the groups of k in turn.
//
// STREAM_K 1: clusters are persistent, a block an SM, and have an equal share each of all output tiles' steps of K
// (stream_k.cuh). A warpgroup of its own has the thread that loads. At the end of an output the warps of the same rows
// exchange their sums (warp_sums.cuh), while stages of the next output load. RESIDENT 2: the next kernel's blocks fit
// beside this one's and load their first weights meanwhile.
// STREAM_K 0: a cluster has one output. A thread of the first warp loads, and RESIDENT blocks fit on an SM, so that
// the next kernel's load their first weights beside this one's last. Partial sums are added once, through distributed
// shared memory. Either way in a fixed order: results are deterministic.
//
// Sums of a group begin at the bits of a float in whose binade sums up to 2^22 stay (block_tile.cuh): they need no
// conversion, and an FFMA begins them again, which is issued in every cycle; a conversion in every second.
// DUAL_GRAINED: integers add up in the tensor cores' accumulators over all of K.
#if !defined(ROW_WARPGROUPS) || !defined(K_WARPGROUPS) || !defined(TOKENS) || !defined(STAGES) || \
    !defined(K_SPLIT) || !defined(RESIDENT) || !defined(STREAM_K)
#error "ROW_WARPGROUPS, K_WARPGROUPS, TOKENS, STAGES, K_SPLIT, RESIDENT and STREAM_K choose the kernel"
#endif
constexpr int TILES = ROW_WARPGROUPS * 4;
constexpr int THREADS = ROW_WARPGROUPS * K_WARPGROUPS * 128;
constexpr int OUT_PARTS = K_WARPGROUPS;
constexpr int SHARERS = 1, K_PARTS = K_SPLIT, K_SETS = K_WARPGROUPS;
#include "imma/block_tile.cuh"
constexpr int GRANULE = TOKENS <= 64 || TOKENS == 96 ? TOKENS : TOKENS / 2;  // tokens of one MMA
constexpr int GRANULES = TOKENS / GRANULE;
#include "imma/stream_k.cuh"
#include "imma/warp_sums.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int LAG = 2;  // rounds of a set until the stages of one are requested again
static_assert(STAGES > LAG * K_WARPGROUPS, "what a set waits for has been requested");
static_assert(TOKENS % GRANULE == 0, "whole granules");
constexpr int LOADED_BYTES = TILES * (TILE_BYTES + SCALE_BYTES) + TOKENS * GROUP + TOKEN_SCALES * 4;  // of a stage
constexpr int WARPS = THREADS / 32;
constexpr int SLOTS_AT = STAGES * STAGE_BYTES, OUT_AT = SLOTS_AT + WARPS * WARP_SLOTS_BYTES;  // STREAM_K only
constexpr int BARRIERS_AT = STREAM_K ? OUT_AT + WARPS * WARP_OUT_BYTES : STAGES * STAGE_BYTES;
static_assert(!STREAM_K || !INT8_TAIL, "a step is a group");
constexpr int PRODUCERS = STREAM_K ? 128 : 0;  // threads, of which one requests
// Registers of a consumer's thread and of a producer's; together no more than a block begins with.
constexpr int FEWER_REGISTERS = 32;
constexpr int REGISTERS = 65536 / RESIDENT / (THREADS + 128) / 8 * 8;
constexpr int MORE_REGISTERS = (REGISTERS * (THREADS + 128) - FEWER_REGISTERS * 128) / THREADS / 8 * 8;

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

__device__ inline void multiply(Sums& sums, Weights& weights, uint64_t tokens) {
  sums.touch();
  weights.touch();
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i) wgmma_s8_k32(sums.of, weights.a[i], advance_descriptor(tokens, i * MMA_K), true);
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

// A warpgroup's sums of 64 rows and all tokens.
struct Accumulators {
  Sums sums[GRANULES];  // of a group; DUAL_GRAINED: of all
#if !DUAL_GRAINED
  float total[GRANULES][GRANULE / 2] = {};
#endif

  __device__ inline Accumulators() {
#pragma unroll
    for (int g = 0; g < GRANULES; ++g)
#pragma unroll
      for (int i = 0; i < GRANULE / 2; ++i) sums[g].of[i] = DUAL_GRAINED ? 0 : BIAS_BITS;
  }

  __device__ inline Sum at(int g, int i) const {
#if DUAL_GRAINED
    return sums[g].of[i];
#else
    return total[g][i];
#endif
  }

  // Add a stage's products. meanwhile: what to do while the tensor cores work.
  template <typename Meanwhile>
  __device__ inline void add_stage(uint32_t stage, int tile, int lane, bool upper_tail, const Meanwhile& meanwhile) {
    Weights weights;
    widen(weights, stage, tile, lane, upper_tail);
#pragma unroll
    for (int g = 0; g < GRANULES; ++g)
      multiply(sums[g], weights, advance_descriptor(swizzled_descriptor(stage), g * GRANULE * GROUP));
    meanwhile();
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
  }
};

// The steps of K of a block, by number: every K_SPLIT-th from `first` of those of all output tiles, one after another.
struct Work {
  const Grid& grid;
  int first, count;
  uint32_t inverse;  // (2^32 - 1) / steps, rounded down

  __device__ inline int at(int number) const { return first + number * K_SPLIT; }
  __device__ inline int output_of(int at) const {
    if constexpr (!STREAM_K) return 0;
    const int output = __umulhi(at, inverse);
    return (output + 1) * grid.steps > at ? output : output + 1;
  }
};

// Requests of a stage, by one thread.
struct Producer {
  const TensorMap &w, &sw, &x, &sx;
  const Work& work;
  uint32_t ring, full;
  int first_tile, first_token;  // unless STREAM_K

  __device__ inline void load_weights(int slot, int number) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int output = work.output_of(work.at(number)), step = work.at(number) - output * work.grid.steps;
    const int tile = STREAM_K ? work.grid.first_tile(output, 0) : first_tile;
    mbarrier_arrive_expect_tx(barrier, LOADED_BYTES);
    tma_load_2d(stage + TILES_AT, w, step * (TILE_BYTES / 8), tile, barrier);  // past the end there are zeros
    tma_load_2d(stage + SCALES_AT, sw, step * (SCALE_BYTES / 8), tile, barrier);
  }

  __device__ inline void load_tokens(int slot, int number) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int output = work.output_of(work.at(number));
    const int group = group_of(work.at(number) - output * work.grid.steps, work.grid.groups);
    const int token = STREAM_K ? work.grid.first_token(output) : first_token;
    tma_load_2d(stage, x, group * GROUP, token, barrier);
    if constexpr (A_GROUPED) tma_load_2d(stage + TOKEN_SCALES_AT, sx, token / 2, group, barrier);  // of two each
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCERS, RESIDENT)
flexq_imma_cluster(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap sw,
                   const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap sx_of_groups,
                   const float* sx, const half_bits* bias, half_bits* y, int m, int n, int k,
                   [[maybe_unused]] const half_bits* sn, [[maybe_unused]] float* partial_sums,
                   [[maybe_unused]] int* flags, [[maybe_unused]] int launch, [[maybe_unused]] int steps_of_share,
                   [[maybe_unused]] int longer_shares, uint32_t inverse) {
  extern __shared__ __align__(SWIZZLE_BYTES) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int tile = warp % TILES, set = warp / TILES;  // of a consumer
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT;
  const Grid grid(m, n, k);
#if STREAM_K
  const int cluster = (gridDim.x - 1 - blockIdx.x) / K_SPLIT;
  const auto begin_of = [&](int c) { return c * steps_of_share + min(c, longer_shares); };
  const int begin = begin_of(cluster), end = begin_of(cluster + 1), first_tile = 0, first_token = 0;
#else
  const int begin = 0, end = grid.steps, first_tile = blockIdx.y * TILES;
  const int first_token = static_cast<int>(blockIdx.x) / K_SPLIT * TOKENS;
#endif
  const Work work{grid, begin + rank, (end - begin - rank + K_SPLIT - 1) / K_SPLIT, inverse};
  const Producer producer{w, sw, x, sx_of_groups, work, ring, full, first_tile, first_token};
  const int at_first = min(STAGES, work.count);

  let_next_kernel_start();
  if constexpr (STREAM_K && RESIDENT > 1) {
    // A cluster without work stays until the kernel before has ended. By then the next one's blocks have their SMs, one
    // each: had this block left its SM before, two of them would be there.
    if (begin >= grid.outputs * grid.steps) {
      wait_for_previous_kernel();
      return;
    }
  }
  if (threadIdx.x == (STREAM_K ? THREADS : 0)) {
    prefetch_tensor_map(w), prefetch_tensor_map(sw), prefetch_tensor_map(x);
    if constexpr (A_GROUPED) prefetch_tensor_map(sx_of_groups);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) mbarrier_init(full + s * 8, 1), mbarrier_init(empty + s * 8, TILES);
    fence_mbarrier_init();
  }
#if STREAM_K
  const uint32_t sums_barriers = empty + STAGES * 8;
  if constexpr (CONTRIBUTORS > 1) {
    if (threadIdx.x == 0) Contributors::initialize(sums_barriers);
    __syncthreads();
    cluster_arrive();
  } else {
    __syncthreads();
  }
  if (warp >= WARPS) {
    setmaxnreg_decrease<FEWER_REGISTERS>();
    if (threadIdx.x == THREADS) {
      for (int i = 0; i < at_first; ++i) producer.load_weights(i, i);
      wait_for_previous_kernel();  // weights are constant; activations may be what it just wrote
      for (int i = 0; i < at_first; ++i) producer.load_tokens(i, i);
      Slot<1> freed{0};
      for (int i = at_first; i < work.count; ++i, freed.next()) {
        mbarrier_wait(empty + freed.index * 8, freed.parity);
        producer.load_weights(freed.index, i);
        producer.load_tokens(freed.index, i);
      }
    }
    __syncwarp();
    if constexpr (CONTRIBUTORS > 1) cluster_wait();
  } else {
    setmaxnreg_increase<MORE_REGISTERS>();
    const Contributors contributors{ring + SLOTS_AT, sums_barriers, rank, set, tile, lane};
    const auto place = [&](int c) { return (c * K_SPLIT + rank) * WARPS + warp; };
    const auto share = [&](int c) { return partial_sums + place(c) * WARP_SHARE_FLOATS; };
    Slot<K_WARPGROUPS> slot{set};
    int i = set, number = 0;
    for (int output = work.output_of(begin); output * grid.steps < end; ++output, ++number) {
      const int to = min(end, (output + 1) * grid.steps);
      const int count = (to - work.first + K_SPLIT - 1) / K_SPLIT;  // to the end of this output
      const int stages = max(0, (count - i + K_WARPGROUPS - 1) / K_WARPGROUPS);  // of this set
      i += stages * K_WARPGROUPS;
      Accumulators accumulators;
      for (int left = stages; left > 0; --left, slot.next()) {
        mbarrier_wait(full + slot.index * 8, slot.parity);
        accumulators.add_stage(ring + slot.index * STAGE_BYTES, tile, lane, false, [] {});
        if (lane == 0) mbarrier_arrive(empty + slot.index * 8);
      }
      Total total;
#pragma unroll
      for (int g = 0; g < GRANULES; ++g)
#pragma unroll
        for (int e = 0; e < GRANULE / 2; ++e) total[g][e] = accumulators.at(g, e);
      Owned owned;
      if constexpr (CONTRIBUTORS > 1) contributors.reduce(owned, total, number, to < end);
      else take_owned(owned, total, 0);
      if (begin > output * grid.steps) {
        contributors.store_partial(owned, share(cluster), flags + place(cluster), launch);
        continue;
      }
      for (int c = cluster + 1; begin_of(c) < (output + 1) * grid.steps; ++c)
        contributors.add_partial(owned, share(c), flags + place(c), launch);
      const int first_row = (grid.first_tile(output, 0) + tile) * MMA_ROWS;
      write_warp(owned, contributors.chunks(), ring + OUT_AT + warp * WARP_OUT_BYTES, bias, y, m, n, first_row,
                 grid.first_token(output) + contributors.first_token(), sx, sn);
    }
  }
#else
  if (threadIdx.x == 0)
    for (int i = 0; i < at_first; ++i) producer.load_weights(i, i);
  __syncthreads();
  if (threadIdx.x == 0) {
    wait_for_previous_kernel();  // weights are constant; activations may be what it just wrote
    for (int i = 0; i < at_first; ++i) producer.load_tokens(i, i);
  }
  __syncwarp();

  Accumulators accumulators;
  Slot<K_WARPGROUPS> slot{set};
  Slot<1> freed{0};
  for (int i = set; i < work.count; i += K_WARPGROUPS, slot.next()) {
    mbarrier_wait(full + slot.index * 8, slot.parity);
    const auto request_more = [&] {  // the stages of LAG rounds ago: mostly all have left them by now
      if (i < LAG * K_WARPGROUPS || warp != 0) return;
#pragma unroll
      for (int q = 0; q < K_WARPGROUPS; ++q, freed.next()) {
        const int next = i - LAG * K_WARPGROUPS + q + STAGES;
        if (next < work.count && lane == 0) {
          mbarrier_wait(empty + freed.index * 8, freed.parity);
          producer.load_weights(freed.index, next);
          producer.load_tokens(freed.index, next);
        }
      }
      __syncwarp();
    };
    const bool upper_tail = work.at(i) == grid.groups - 1;
    accumulators.add_stage(ring + slot.index * STAGE_BYTES, tile, lane, upper_tail, request_more);
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
      out[token * OUT_STRIDE + tile * MMA_ROWS + lane / 4 + i % 4 / 2 * 8] = bits_of(accumulators.at(g, i));
    }
  write_out(reinterpret_cast<const float*>(shared), bias, y, m, n, first_tile, first_token, rank, sx, sn);
#endif
}
