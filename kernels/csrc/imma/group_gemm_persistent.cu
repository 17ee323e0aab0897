// imma/group_gemm_persistent.cu: Y[M,N] = X[M,K] . W[N,K]^T by warpgroup MMA (int8), for the most tokens: a
// persistent, warp-specialized kernel with TMA and stream-K. Operands are those of imma/group_gemm_wgmma.cu. The
// function keeps the name flexq_imma_bulk of stored profiles.
//
// The producer, one thread, loads weights, tokens and scales by TMA, one group of k per pipeline stage. Two consumer
// warpgroups multiply, each 64 rows with all tokens of the block. A consumer dequantizes its weights in registers and
// takes the tokens in GRANULES. While the tensor cores process a granule of one warpgroup, the other converts and
// scales its sums; named barriers keep them alternating.
// WHOLE_K: sums are accumulated over all of K by the tensor cores, all tokens at once. A warpgroup
// dequantizes the next group's weights during the WGMMAs of one; there is no barrier between the warpgroups.
//
// Issue slots are the bottleneck: during int8 WGMMAs a scheduler issues almost nothing else
// (docs/kernels/flexq-imma.md). BIASED sums start at the bits of BIAS (block_tile.cuh): they are floats without a
// conversion, and the FMA that scales them subtracts the bias exactly.
//
// Thread blocks are persistent, one per SM. Each computes an equal share of the groups of the first output tiles, then
// whole output tiles (stream_k.cuh). The block with the first groups of a shared output tile reduces the partial sums,
// in the order of k. It waits only for blocks with lower numbers, which are scheduled first: no deadlock.
// The SHARERS blocks of a cluster have the same tokens; each loads a part and multicasts it to all.
// SPLIT 1: stream-K. SPLIT 2, WHOLE_K only: the two blocks of a cluster compute half of K each of one output
// tile and reduce through distributed shared memory, each the sums of half of the tokens.
#if !defined(GRANULES) || !defined(SHARERS) || !defined(SPLIT)
#error "define GRANULES, SHARERS and SPLIT"
#endif
constexpr int K_SPLIT = 1, WARPGROUPS = 2, GRANULE = 128;
constexpr int THREADS = WARPGROUPS * 128;  // of consumers
constexpr int TILES = WARPGROUPS * 4, TOKENS = GRANULES * GRANULE;
constexpr int STAGES = GRANULES == 1 ? 6 : 4;
constexpr bool STREAM_K = SPLIT == 1;
constexpr int K_PARTS = SPLIT > 1 ? SPLIT : 1;  // blocks of a cluster that divide K
constexpr int CONTRIBUTORS = K_PARTS;
#include "imma/block_tile.cuh"
#include "imma/stream_k.cuh"
#include "imma/warp_sums.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/synchronization.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

static_assert(K_PARTS == 1 || (WHOLE_K && SHARERS == 1 && TOKENS / 64 % K_PARTS == 0),
              "SPLIT > 1 needs WHOLE_K, SHARERS 1 and TOKENS / 64 divisible by SPLIT");
constexpr int BLOCK_WARPS = THREADS / 32 + 4;  // with the producer warpgroup
// setmaxnreg of consumers and producers: together all registers of an SM.
constexpr int MORE_REGISTERS = 232, FEWER_REGISTERS = 40;

constexpr int WARPS = THREADS / 32;  // of consumers
constexpr int OUT_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = OUT_AT + WARPS * WARP_OUT_BYTES;

// Saves a conversion per sum, costs half an instruction and some registers: 5 % faster where registers suffice.
constexpr bool BIASED = A_GROUPED && GRANULES == 1;
// Token scales are loaded while the WGMMAs are in flight. With stream-K the compiler otherwise places half of the
// conversions before the first scale and groups the resets of the sums: 3 % slower. Without stream-K it does not, and
// early loads would be 2 to 3 % slower.
constexpr bool SCALES_AHEAD = BIASED && STREAM_K;

// TMA loads of a stage: few large ones, because each takes TMA a hundred cycles.
struct Producer {
  const Grid& grid;
  const TensorMap &w, &sw, &x, &sx;
  uint32_t ring, full;
  int rank;

  __device__ inline void load_weights(int slot, int output, int step) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    mbarrier_arrive_expect_tx(barrier, TILES * (TILE_BYTES + SCALE_BYTES) + TOKENS * GROUP + TOKEN_SCALES * 4);
    const int first_tile = grid.first_tile(output, rank);  // TMA fills with zeros past the end
    tma_load_2d(stage + TILES_AT, w, step * (TILE_BYTES / 8), first_tile, barrier);
    tma_load_2d(stage + SCALES_AT, sw, step * (SCALE_BYTES / 8), first_tile, barrier);
  }

  __device__ inline void load_tokens(int slot, int output, int step) const {
    const uint32_t stage = ring + slot * STAGE_BYTES, barrier = full + slot * 8;
    const int group = group_of(step, grid.groups), first_token = grid.first_token(output);
    if constexpr (SHARERS == 1) {
      tma_load_2d(stage, x, group * GROUP, first_token, barrier);
    } else {
      constexpr int SHARE = TOKENS / SHARERS;
      tma_load_2d_multicast(stage + rank * SHARE * GROUP, x, group * GROUP, first_token + rank * SHARE, barrier,
                      (1 << SHARERS) - 1);
    }
    // An element of sx has the scales of two tokens.
    if constexpr (A_GROUPED) tma_load_2d(stage + TOKEN_SCALES_AT, sx, first_token / 2, group, barrier);
  }
};

// Operands of the FP64 FMA that resets two sums. Loaded from shared memory, so that the compiler does not treat them as
// constants.
struct Bias {
  double bits, zero;

  // Stored twice, so that adjacent lanes read different addresses.
  static __device__ inline void store(uint32_t* shared) {
    for (int i = 0; i < 8; ++i) shared[i] = i % 4 < 2 ? BIAS_BITS : 0;
  }

  __device__ inline Bias(uint32_t shared, int lane) {
    const uint4 words = load_shared(shared + lane % 2 * 16);
    asm("mov.b64 %0, {%1, %2};" : "=d"(bits) : "r"(words.x), "r"(words.y));
    asm("mov.b64 %0, {%1, %2};" : "=d"(zero) : "r"(words.z), "r"(words.w));
  }
};

#if !WHOLE_K
struct Sums {
  WgmmaSum values[GRANULE / 2];

  // Keeps the compiler from moving accesses to the sums across it.
  __device__ inline void fence_registers() {
#pragma unroll
    for (int i = 0; i < GRANULE / 2; ++i) asm volatile("" : WGMMA_SUM(values[i])::"memory");
  }

  // Reset sums i and i + 1: together they are a finite double, which is multiplied by zero and added to the bias.
  __device__ inline void reset_pair(int i, const Bias& bias) {
    asm("{\n.reg .f64 both;\nmov.b64 both, {%0, %1};\nfma.rn.f64 both, both, %2, %3;\nmov.b64 {%0, %1}, both;\n}"
        : "+r"(values[i]), "+r"(values[i + 1])
        : "d"(bias.zero), "d"(bias.bits));
  }
};

#endif

// Scales of the tokens of a granule whose sums this lane holds.
struct TokenScales {
  uint32_t shared;
  float2 ahead[SCALES_AHEAD ? GRANULE / MMA_TOKENS : 1];

  __device__ inline TokenScales(uint32_t of_granule, int lane) : shared(of_granule + lane % 4 * 8) {
    if constexpr (SCALES_AHEAD)
#pragma unroll
      for (int j = 0; j < GRANULE / MMA_TOKENS; ++j) ahead[j] = load(j);
  }
  __device__ inline float2 load(int j) const { return load_shared_pair(shared + j * MMA_TOKENS * 4); }
  __device__ inline float2 pair(int j) const { return SCALES_AHEAD ? ahead[j] : load(j); }
};

struct Weights {
  uint32_t a[MMAS][4];
#if !WHOLE_K
  float top, bottom;  // scales of rows lane/4 and lane/4 + 8
#endif
};

__device__ inline Weights widened(uint32_t stage, int tile, int lane, bool upper_tail) {
  const uint32_t scales = load_lane_scales(stage + SCALES_AT + tile * SCALE_BYTES, lane);
  const WeightTile packed(stage + TILES_AT + tile * TILE_BYTES, scales, lane, upper_tail);
  Weights weights;
  packed.widen(weights.a);
#if !WHOLE_K
  weights.top = packed.scale[0], weights.bottom = packed.scale[1];
#endif
  return weights;
}

#if WHOLE_K
// Issue the WGMMAs of a group: 64 rows, all tokens.
__device__ inline void multiply(Sum (&total)[GRANULES][GRANULE / 2], const uint32_t (&a)[MMAS][4], uint64_t tokens) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i) {
    const uint64_t b = advance_descriptor(tokens, i * MMA_K);
    if constexpr (GRANULES == 2) wgmma_k32(total[0], total[1], a[i], b);
    else wgmma_k32(total[0], a[i], b, true);
  }
  wgmma_commit();
}
#endif

#if !WHOLE_K
__device__ inline void multiply(Sums& sums, uint32_t (&a)[MMAS][4], uint64_t tokens) {
  sums.fence_registers();
#pragma unroll
  for (int o = 0; o < OPERAND_WORDS; ++o) asm volatile("" : "+r"(a[o / 4][o % 4]));  // computed before the WGMMAs
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < MMAS; ++i)
    wgmma_k32(sums.values, a[i], advance_descriptor(tokens, i * MMA_K), BIASED || i > 0);
  wgmma_commit();
}

// Both forms have the same bits: an integer times an FP16 scale, rounded once.
__device__ inline float scaled(int sum, float scale, [[maybe_unused]] float bias) {
  return BIASED ? fmaf(__int_as_float(sum), scale, bias) : static_cast<float>(sum) * scale;
}

__device__ inline void add_scaled(float (&total)[GRANULE / 2], Sums& sums, float top, float bottom,
                                  const TokenScales& scales, [[maybe_unused]] const Bias& bias) {
  [[maybe_unused]] const float top_bias = -BIAS * top, bottom_bias = -BIAS * bottom;  // exact: scales are halves
#pragma unroll
  for (int j = 0; j < GRANULE / MMA_TOKENS; ++j) {
    float* t = total + 4 * j;
    const int* s = sums.values + 4 * j;
    if constexpr (!A_GROUPED) {
      t[0] = fmaf(static_cast<float>(s[0]), top, t[0]), t[1] = fmaf(static_cast<float>(s[1]), top, t[1]);
      t[2] = fmaf(static_cast<float>(s[2]), bottom, t[2]), t[3] = fmaf(static_cast<float>(s[3]), bottom, t[3]);
      continue;
    }
    const float2 token_scale = scales.pair(j);
    t[0] = fmaf(scaled(s[0], top, top_bias), token_scale.x, t[0]);
    t[1] = fmaf(scaled(s[1], top, top_bias), token_scale.y, t[1]);
    t[2] = fmaf(scaled(s[2], bottom, bottom_bias), token_scale.x, t[2]);
    t[3] = fmaf(scaled(s[3], bottom, bottom_bias), token_scale.y, t[3]);
    if constexpr (BIASED) sums.reset_pair(4 * j, bias), sums.reset_pair(4 * j + 2, bias);
  }
}
#endif

// Release a stage: a warp arrives at its `empty` mbarrier in every block that shares the tokens.
__device__ inline void release_stage(uint32_t empty, int lane) {
  __syncwarp();
  if constexpr (SHARERS > 1) {
    if (lane < SHARERS) mbarrier_arrive_remote(empty, lane);
  } else {
    if (lane == 0) mbarrier_arrive(empty);
  }
}

// Rank of the block of a K-split cluster that reduces and writes the c-th 64 tokens.
__device__ constexpr int owner_of(int c) { return c * K_PARTS / (TOKENS / 64); }

// Range of K of block k_rank, of a whole output tile.
__device__ inline Part k_split_part(const Part& whole, int k_rank) {
  return {whole.output, whole.to * k_rank / K_PARTS, whole.to * (k_rank + 1) / K_PARTS};
}

#if WHOLE_K
// Reduce the partial sums of a K-split cluster for the tokens that this block owns. Partial sums of the other blocks'
// tokens are exchanged through the ring.
__device__ inline void reduce_over_k(Sum (&total)[GRANULES][GRANULE / 2], float4* ring, int k_rank) {
  constexpr int SUMS_OF_64 = 32;  // a thread's sums of 64 tokens
  named_barrier_sync(1, THREADS);  // both warpgroups have read the last stages
#pragma unroll
  for (int c = 0; c < TOKENS / 64; ++c)
    if (owner_of(c) != k_rank)
#pragma unroll
      for (int i = c * SUMS_OF_64; i < (c + 1) * SUMS_OF_64; i += 4) {
        const Sum* t = &total[i / (GRANULE / 2)][i % (GRANULE / 2)];
        ring[i / 4 * THREADS + threadIdx.x] = make_float4(bits_of(t[0]), bits_of(t[1]), bits_of(t[2]), bits_of(t[3]));
      }
  cluster_sync();
#pragma unroll
  for (int c = 0; c < TOKENS / 64; ++c)
    if (owner_of(c) == k_rank)
      for (int other = 1; other < K_PARTS; ++other)
#pragma unroll
        for (int i = c * SUMS_OF_64; i < (c + 1) * SUMS_OF_64; i += 4) {
          const float4 sums = load_cluster(shared_address(ring + i / 4 * THREADS + threadIdx.x),
                                           (k_rank + other) % K_PARTS);
          Sum* t = &total[i / (GRANULE / 2)][i % (GRANULE / 2)];
          t[0] += sum_of(sums.x), t[1] += sum_of(sums.y), t[2] += sum_of(sums.z), t[3] += sum_of(sums.w);
        }
}
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * 32, 1)
flexq_imma_bulk(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap sw,
                const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap sx_of_groups, const float* sx,
                const half_bits* bias, half_bits* y, int m, int n, int k, [[maybe_unused]] const FeatureScale* sn,
                [[maybe_unused]] float* partial_sums, [[maybe_unused]] int* flags, [[maybe_unused]] int launch,
                int shared_outputs, int steps_of_share, int longer_shares, uint32_t inverse) {
  const Shares shares{shared_outputs, steps_of_share, longer_shares, inverse};
  extern __shared__ __align__(SWIZZLE_BYTES) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + BARRIERS_AT, empty = full + STAGES * 8;
  const uint32_t bias_at = empty + STAGES * 8;
  const int cluster = (gridDim.x - 1 - blockIdx.x) / (SHARERS * K_PARTS), rank = blockIdx.x % SHARERS;
  [[maybe_unused]] const int k_rank = blockIdx.x % K_PARTS;
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

  let_next_kernel_start();
  if (threadIdx.x == THREADS) {
    prefetch_tensor_map(w), prefetch_tensor_map(sw), prefetch_tensor_map(x);
    if constexpr (A_GROUPED) prefetch_tensor_map(sx_of_groups);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(full + s * 8, 1);
      mbarrier_init(empty + s * 8, SHARERS * THREADS / 32);
    }
    fence_mbarrier_init();
    Bias::store(reinterpret_cast<uint32_t*>(shared) + (bias_at - ring) / 4);
  }
  if constexpr (SHARERS > 1) cluster_sync();
  else __syncthreads();

  if (warp >= THREADS / 32) {
    setmaxnreg_decrease<FEWER_REGISTERS>();
    if (threadIdx.x == THREADS) {
      const Grid grid(m, n, k);
      const Producer producer{grid, w, sw, x, sx_of_groups, ring, full, rank};
      const Parts parts{grid, shares, cluster};
      PipelineState stage;
      Part part;
      bool must_wait = true;  // weights are constant, activations may be the output of the previous kernel
      for (int number = 0; parts.get(part, number); ++number) {
        if constexpr (K_PARTS > 1) part = k_split_part(part, k_rank);
        for (int step = part.from; step < part.to; ++step) {
          mbarrier_wait(empty + stage.index * 8, stage.parity ^ 1);
          producer.load_weights(stage.index, part.output, step);
          if (must_wait) wait_for_previous_kernel(), must_wait = false;
          producer.load_tokens(stage.index, part.output, step);
          stage.next();
        }
      }
    }
    __syncwarp();
    if constexpr (K_PARTS > 1) cluster_sync();  // matches the one in reduce_over_k
  } else {
    setmaxnreg_increase<MORE_REGISTERS>();
    const Grid grid(m, n, k);
    const Parts parts{grid, shares, cluster};
    const int warpgroup = warp / 4;
    PipelineState stage;
#if !WHOLE_K
    const Bias sum_bias(bias_at, lane);
    if (warpgroup == WARPGROUPS - 1) named_barrier_arrive(1, 256);
#endif
    Part part;
    for (int number = 0; parts.get(part, number); ++number) {
#if WHOLE_K
      if constexpr (K_PARTS > 1) part = k_split_part(part, k_rank);
      Sum total[GRANULES][GRANULE / 2] = {};
      Weights weights[2];  // one is multiplied while the other is dequantized
      uint32_t used_stage = 0;   // `empty` mbarrier of the previous group's stage
      const auto add_group = [&](Weights& of_group, bool first) {
        const uint32_t at = ring + stage.index * STAGE_BYTES;
        mbarrier_wait(full + stage.index * 8, stage.parity);
        of_group = widened(at, warp, lane, false);
        multiply(total, of_group.a, swizzled_descriptor(at));
        wgmma_wait<1>();  // the previous group is complete: its stage and weights may be overwritten
        if (!first) release_stage(used_stage, lane);
        used_stage = empty + stage.index * 8;
        stage.next();
      };
      int step = part.from;
      for (; step + 1 < part.to; step += 2) {
        add_group(weights[0], step == part.from);
        add_group(weights[1], false);
      }
      if (step < part.to) add_group(weights[0], step == part.from);
      wgmma_wait<0>();
#pragma unroll
      for (int g = 0; g < GRANULES; ++g)
#pragma unroll
        for (int i = 0; i < GRANULE / 2; ++i) asm volatile("" : WGMMA_SUM(total[g][i])::"memory");
      if (part.from < part.to) release_stage(used_stage, lane);
      if constexpr (K_PARTS > 1) reduce_over_k(total, reinterpret_cast<float4*>(shared), k_rank);
#else
      float total[GRANULES][GRANULE / 2] = {};
      Sums sums;
      if constexpr (BIASED)
#pragma unroll
        for (int i = 0; i < GRANULE / 2; ++i) sums.values[i] = BIAS_BITS;
      mbarrier_wait(full + stage.index * 8, stage.parity);
      uint32_t at = ring + stage.index * STAGE_BYTES;
      Weights weights = widened(at, warp, lane, part.from == grid.groups - 1);
      for (int step = part.from; step < part.to; ++step) {
        const uint32_t used_stage = empty + stage.index * 8;
        const uint64_t tokens = swizzled_descriptor(at);
        const float top = weights.top, bottom = weights.bottom;
        const bool more = step + 1 < part.to;
        stage.next();
        const uint32_t next = more ? ring + stage.index * STAGE_BYTES : at;  // after the last step, any valid address
#pragma unroll
        for (int g = 0; g < GRANULES; ++g) {
          if (g == GRANULES - 1 && more) mbarrier_wait(full + stage.index * 8, stage.parity);
          named_barrier_sync(1 + warpgroup, 256);
          multiply(sums, weights.a, advance_descriptor(tokens, g * GRANULE * GROUP));
          named_barrier_arrive(1 + (warpgroup + 1) % WARPGROUPS, 256);
          const TokenScales scales(at + TOKEN_SCALES_AT + g * GRANULE * 4, lane);
          wgmma_wait<0>();
          sums.fence_registers();
          if (g == GRANULES - 1)  // interleaved with the conversions of sums
            weights = widened(next, warp, lane, step + 1 == grid.groups - 1);
          add_scaled(total[g], sums, top, bottom, scales, sum_bias);
        }
        at = next;
        release_stage(used_stage, lane);
      }
#endif
      parts.get(part, number = opaque(number));  // recomputed, to save registers in the mainloop
      const int first_token = grid.first_token(part.output), first_tile = grid.first_tile(part.output, rank);
      const Contributors contributors{0, 0, k_rank, warp, lane};
      Owned owned;
      take_owned(owned, total, k_rank);
      if constexpr (STREAM_K) {
        const auto warp_index = [&](int c) { return (c * SHARERS + rank) * WARPS + warp; };
        const auto warp_partials = [&](int c) { return partial_sums + warp_index(c) * WARP_SHARE_FLOATS; };
        if (part.from > 0) {
          contributors.store_partial(owned, warp_partials(cluster), flags + warp_index(cluster), launch);
          continue;
        }
        if (part.to < grid.steps)
          for (int c = cluster + 1; parts.begin_of(c) < (part.output + 1) * grid.steps; ++c)
            contributors.add_partial(owned, warp_partials(c), flags + warp_index(c), launch);
      }
      write_warp(owned, contributors.chunks(), ring + OUT_AT + warp * WARP_OUT_BYTES, bias, y, m, n,
                 (first_tile + warp) * MMA_ROWS, first_token + contributors.first_token(), sx, sn);
    }
#if !WHOLE_K
    if (warpgroup == 0) named_barrier_sync(1, 256);  // matches the last warpgroup's arrival
#endif
  }
  // A block may exit once no other arrives at its mbarriers or reads its sums.
  if constexpr (SHARERS * K_PARTS > 1) cluster_sync();
}
