// imma/group_gemm_cluster.cu: Y[M,N] = X[M,K] . W[N,K]^T by warpgroup MMA for 17 to 128 tokens, where reading weights
// takes about as long as multiplying, and for more where N is small. Operands are those of imma/group_gemm_wgmma.cu.
//
// Clusters of K_SPLIT blocks are persistent, at most one block per SM, with equal shares of the steps of K of all output
// tiles (stream_k.cuh). The blocks of a cluster take the groups of k round-robin. The producer, one thread of its own
// warpgroup, loads a group's weights, tokens and scales by TMA into a pipeline stage in shared memory. ROW_WARPGROUPS
// consumer warpgroups multiply a stage, each 64 rows with all TOKENS of the block. They synchronize with the producer
// only, by the mbarriers of each stage, so one dequantizes weights while others multiply. After an output tile, the warps
// of the same rows exchange partial sums (warp_sums.cuh) while stages of the next tile load. The order of reductions is
// fixed: results are deterministic.
//
// Every consumer waits for every phase of a stage's mbarrier. If warps took the stages in turn, one could pass: the wait
// for a phase also returns if the previous phase is still incomplete (PTX ISA, mbarrier.try_wait).
//
// RESIDENT 2: blocks of the next kernel fit on the SMs next to this kernel's, and load their first weights early.
//
// Integer sums of a group start at the bits of BIAS (block_tile.cuh), so they are floats without a conversion. An FFMA
// resets them, which can issue every cycle; a conversion only every second cycle.
// WHOLE_K: sums are accumulated over all of K by the tensor cores.
#if !defined(ROW_WARPGROUPS) || !defined(TOKENS) || !defined(STAGES) || !defined(K_SPLIT) || !defined(RESIDENT)
#error "define ROW_WARPGROUPS, TOKENS, STAGES, K_SPLIT and RESIDENT"
#endif
constexpr int TILES = ROW_WARPGROUPS * 4;
constexpr int THREADS = ROW_WARPGROUPS * 128;  // of consumers
constexpr int SHARERS = 1, CONTRIBUTORS = K_SPLIT;
constexpr bool STREAM_K = true;
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

static_assert(TOKENS % GRANULE == 0, "TOKENS must be a multiple of GRANULE");
constexpr int LOADED_BYTES = TILES * (TILE_BYTES + SCALE_BYTES) + TOKENS * GROUP + TOKEN_SCALES * 4;  // of a stage
constexpr int WARPS = THREADS / 32;
constexpr int SLOTS_AT = STAGES * STAGE_BYTES, OUT_AT = SLOTS_AT + WARPS * WARP_SLOTS_BYTES;
constexpr int BARRIERS_AT = OUT_AT + WARPS * WARP_OUT_BYTES;
constexpr int PRODUCERS = 128;  // threads of the producer warpgroup; one of them loads
// setmaxnreg of producers (FEWER) and consumers (MORE): their total may not exceed the block's registers at launch. One
// consumer warpgroup would get more than a thread can have; none uses more than 240.
constexpr int FEWER_REGISTERS = 32;
constexpr int REGISTERS = 65536 / RESIDENT / (THREADS + PRODUCERS) / 8 * 8;
constexpr int LEFT_REGISTERS = (REGISTERS * (THREADS + PRODUCERS) - FEWER_REGISTERS * PRODUCERS) / THREADS / 8 * 8;
constexpr int MORE_REGISTERS = LEFT_REGISTERS < 240 ? LEFT_REGISTERS : 240;

struct Sums {
  WgmmaSum values[GRANULE / 2];

  // Keeps the compiler from moving accesses to the sums across it.
  __device__ inline void fence_registers() {
#pragma unroll
    for (int i = 0; i < GRANULE / 2; ++i) asm volatile("" : WGMMA_SUM(values[i])::"memory");
  }
};

struct Weights {
  uint32_t a[MMAS][4];
#if !WHOLE_K
  float scale[2];  // of rows lane/4 and lane/4 + 8
#endif

  // Keeps the compiler from writing the operands' registers earlier.
  __device__ inline void fence_registers() {
#pragma unroll
    for (int o = 0; o < OPERAND_WORDS; ++o) asm volatile("" : "+r"(a[o / 4][o % 4]));
  }
};

__device__ inline void widen(Weights& weights, uint32_t stage, int tile, int lane, bool upper_tail) {
  const uint32_t scales = load_lane_scales(stage + SCALES_AT + tile * SCALE_BYTES, lane);
  const WeightTile packed(stage + TILES_AT + tile * TILE_BYTES, scales, lane, upper_tail);
  packed.widen(weights.a);
#if !WHOLE_K
  weights.scale[0] = packed.scale[0], weights.scale[1] = packed.scale[1];
#endif
}

__device__ inline void multiply(Sums& sums, Weights& weights, uint64_t tokens) {
  sums.fence_registers();
  weights.fence_registers();
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i) wgmma_k32(sums.values, weights.a[i], advance_descriptor(tokens, i * MMA_K), true);
  wgmma_commit();
}

#if !WHOLE_K
// Add sums * scales and reset the sums. An integer times an FP16 scale is rounded once: the bits are those of a
// conversion followed by a multiplication.
__device__ inline void add_scaled(float (&total)[GRANULE / 2], Sums& sums, const Weights& weights, uint32_t token_scales,
                                  int lane) {
  const float bias[2] = {-BIAS * weights.scale[0], -BIAS * weights.scale[1]};  // exact: scales are halves
#pragma unroll
  for (int j = 0; j < GRANULE / MMA_TOKENS; ++j) {
    float2 token_scale;
    if constexpr (A_GROUPED) token_scale = load_shared_pair(token_scales + (j * MMA_TOKENS + lane % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = __int_as_float(sums.values[4 * j + i]);
      const float scaled = fmaf(sum, weights.scale[i / 2], bias[i / 2]);
      float& t = total[4 * j + i];
      if constexpr (A_GROUPED) t = fmaf(scaled, i % 2 == 0 ? token_scale.x : token_scale.y, t);
      else t += scaled;
      sums.values[4 * j + i] = __float_as_int(fmaf(sum, 0.0f, BIAS));
    }
  }
}
#endif

// A warpgroup's accumulators of 64 rows and all tokens.
struct Accumulators {
  Sums sums[GRANULES];  // of one group; WHOLE_K: of all groups
#if !WHOLE_K
  float total[GRANULES][GRANULE / 2] = {};
#endif

  __device__ inline Accumulators() {
#pragma unroll
    for (int g = 0; g < GRANULES; ++g)
#pragma unroll
      for (int i = 0; i < GRANULE / 2; ++i) sums[g].values[i] = WHOLE_K ? 0 : BIAS_BITS;
  }

  __device__ inline Sum at(int g, int i) const {
#if WHOLE_K
    return sums[g].values[i];
#else
    return total[g][i];
#endif
  }

  // Accumulate a stage's products.
  __device__ inline void add_stage(uint32_t stage, int tile, int lane, bool upper_tail) {
    Weights weights;
    widen(weights, stage, tile, lane, upper_tail);
#pragma unroll
    for (int g = 0; g < GRANULES; ++g)
      multiply(sums[g], weights, advance_descriptor(swizzled_descriptor(stage), g * GRANULE * GROUP));
#pragma unroll
    for (int g = 0; g < GRANULES; ++g) {
      if (g + 1 < GRANULES) wgmma_wait<GRANULES - 1>();
      else wgmma_wait<0>();
      sums[g].fence_registers();
      if (g + 1 == GRANULES) weights.fence_registers();
#if !WHOLE_K
      add_scaled(total[g], sums[g], weights, stage + TOKEN_SCALES_AT + g * GRANULE * 4, lane);
#endif
    }
    __syncwarp();
  }
};

// A block's steps of K, counted over consecutive output tiles: step number i is first + i * K_SPLIT.
struct Work {
  const Grid& grid;
  int first, count;
  uint32_t inverse;  // (2^32 - 1) / steps, rounded down

  __device__ inline int at(int number) const { return first + number * K_SPLIT; }
  __device__ inline int output_of(int at) const {
    const int output = __umulhi(at, inverse);
    return (output + 1) * grid.steps > at ? output : output + 1;
  }
};

// TMA loads of a stage, issued by one thread.
struct Producer {
  const TensorMap &w, &sw, &x, &sx;
  const Work& work;
  uint32_t ring, full;

  __device__ inline void load_weights(int slot, int number) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int output = work.output_of(work.at(number)), step = work.at(number) - output * work.grid.steps;
    const int tile = work.grid.first_tile(output, 0);
    mbarrier_arrive_expect_tx(barrier, LOADED_BYTES);
    tma_load_2d(stage + TILES_AT, w, step * (TILE_BYTES / 8), tile, barrier);  // TMA fills with zeros past the end
    tma_load_2d(stage + SCALES_AT, sw, step * (SCALE_BYTES / 8), tile, barrier);
  }

  __device__ inline void load_tokens(int slot, int number) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int output = work.output_of(work.at(number));
    const int group = group_of(work.at(number) - output * work.grid.steps, work.grid.groups);
    const int token = work.grid.first_token(output);
    tma_load_2d(stage, x, group * GROUP, token, barrier);
    if constexpr (A_GROUPED) tma_load_2d(stage + TOKEN_SCALES_AT, sx, token / 2, group, barrier);  // 2 per element
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCERS, RESIDENT)
flexq_imma_cluster(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap sw,
                   const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap sx_of_groups,
                   const float* sx, const half_bits* bias, half_bits* y, int m, int n, int k,
                   [[maybe_unused]] const FeatureScale* sn, float* partial_sums, int* flags, int launch,
                   int steps_of_share, int longer_shares, uint32_t inverse) {
  extern __shared__ __align__(SWIZZLE_BYTES) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = static_cast<int>(blockIdx.x) % K_SPLIT;
  const Grid grid(m, n, k);
  const int cluster = (gridDim.x - 1 - blockIdx.x) / K_SPLIT;
  const auto begin_of = [&](int c) { return c * steps_of_share + min(c, longer_shares); };
  const int begin = begin_of(cluster), end = begin_of(cluster + 1);
  const Work work{grid, begin + rank, (end - begin - rank + K_SPLIT - 1) / K_SPLIT, inverse};
  const Producer producer{w, sw, x, sx_of_groups, work, ring, full};
  const int prologue_stages = min(STAGES, work.count);

  let_next_kernel_start();
  if constexpr (RESIDENT > 1) {
    // A cluster without work exits only after the previous kernel has ended. By then the blocks of the next kernel
    // are placed, one per SM; if this block exited earlier, its SM would get two of them.
    if (begin >= grid.outputs * grid.steps) {
      wait_for_previous_kernel();
      return;
    }
  }
  if (threadIdx.x == THREADS) {
    prefetch_tensor_map(w), prefetch_tensor_map(sw), prefetch_tensor_map(x);
    if constexpr (A_GROUPED) prefetch_tensor_map(sx_of_groups);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) mbarrier_init(full + s * 8, 1), mbarrier_init(empty + s * 8, TILES);
    fence_mbarrier_init();
  }
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
      for (int i = 0; i < prologue_stages; ++i) producer.load_weights(i, i);
      wait_for_previous_kernel();  // weights are constant, activations may be its output
      for (int i = 0; i < prologue_stages; ++i) producer.load_tokens(i, i);
      PipelineState released;
      for (int i = prologue_stages; i < work.count; ++i, released.next()) {
        mbarrier_wait(empty + released.index * 8, released.parity);
        producer.load_weights(released.index, i);
        producer.load_tokens(released.index, i);
      }
    }
    __syncwarp();
    if constexpr (CONTRIBUTORS > 1) cluster_wait();
  } else {
    setmaxnreg_increase<MORE_REGISTERS>();
    const Contributors contributors{ring + SLOTS_AT, sums_barriers, rank, warp, lane};
    const auto warp_index = [&](int c) { return (c * K_SPLIT + rank) * WARPS + warp; };
    const auto warp_partials = [&](int c) { return partial_sums + warp_index(c) * WARP_SHARE_FLOATS; };
    PipelineState slot;
    int i = 0, number = 0;
    for (int output = work.output_of(begin); output * grid.steps < end; ++output, ++number) {
      const int to = min(end, (output + 1) * grid.steps);
      const int count = (to - work.first + K_SPLIT - 1) / K_SPLIT;  // to the end of this output
      const int stages = max(0, count - i);
      // Stages that remain at the upper half of an INT8_TAIL; 0 or more than there are: not in this share.
      [[maybe_unused]] const int steps_to_tail = output * grid.steps + grid.groups - 1 - work.at(i);
      [[maybe_unused]] const int at_tail = steps_to_tail % K_SPLIT == 0 ? stages - steps_to_tail / K_SPLIT : 0;
      i += stages;
      Accumulators accumulators;
      for (int remaining = stages; remaining > 0; --remaining, slot.next()) {
        mbarrier_wait(full + slot.index * 8, slot.parity);
        accumulators.add_stage(ring + slot.index * STAGE_BYTES, warp, lane, INT8_TAIL && remaining == at_tail);
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
        contributors.store_partial(owned, warp_partials(cluster), flags + warp_index(cluster), launch);
        continue;
      }
      for (int c = cluster + 1; begin_of(c) < (output + 1) * grid.steps; ++c)
        contributors.add_partial(owned, warp_partials(c), flags + warp_index(c), launch);
      const int first_row = (grid.first_tile(output, 0) + warp) * MMA_ROWS;
      write_warp(owned, contributors.chunks(), ring + OUT_AT + warp * WARP_OUT_BYTES, bias, y, m, n, first_row,
                 grid.first_token(output) + contributors.first_token(), sx, sn);
    }
  }
}
