// imma/warp_sums.cuh: reduction and epilogue of a warp's accumulators, 16 rows of W and all TOKENS of a block.
//
// CONTRIBUTORS warps of a cluster, one in each of its blocks, have the same rows and split K. Each of them owns some
// chunks of 16 tokens and reduces their partial sums, in the order of contributors. Partial sums are sent to their
// owner's shared memory by asynchronous stores, counted by an mbarrier: only warps of the same rows wait for each other.
// Stream-K then reduces over clusters, through global memory, with one flag per warp.
//
// The including source defines TOKENS, TILES, GRANULES, GRANULE and CONTRIBUTORS first.
#pragma once
#include "imma/layout.cuh"
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/synchronization.cuh"
#include "ptx/wgmma.cuh"

constexpr int CHUNK = 16, CHUNKS = TOKENS / CHUNK;
constexpr int MOST_CHUNKS = (CHUNKS + CONTRIBUTORS - 1) / CONTRIBUTORS;  // that a contributor owns
constexpr bool EVEN = CHUNKS % CONTRIBUTORS == 0;                        // all own equally many
constexpr int HALF_BYTES = 32 * 16, CHUNK_BYTES = 2 * HALF_BYTES;        // sums of 16 rows and 8 or 16 tokens
constexpr int SLOT_BYTES = MOST_CHUNKS * CHUNK_BYTES;                    // for one contributor's sums at an owner
constexpr int WARP_SLOTS_BYTES = (CONTRIBUTORS - 1) * SLOT_BYTES;
// Partial sums of a warp in global memory. MARKED, if they are few: each has the number of the launch as its mark, so
// that no flag and fence is needed. Marked memory is zeroed once per replay of a graph, so it should not be large.
constexpr bool MARKED = CONTRIBUTORS > 1;
constexpr int READ_AT_ONCE = EVEN && MOST_CHUNKS % 2 == 0 ? 4 : 2;  // sums of 8 tokens, polled together
static_assert(!MARKED || MOST_CHUNKS * 2 % READ_AT_ONCE == 0, "READ_AT_ONCE must divide the sums of a warp");
constexpr int WARP_SHARE_FLOATS = SLOT_BYTES / 4 * (MARKED ? 2 : 1);
constexpr int OUT_CHUNKS = MOST_CHUNKS < 4 ? MOST_CHUNKS : 4;            // that are written at once
constexpr int WARP_OUT_BYTES = OUT_CHUNKS * CHUNK * MMA_ROWS * 2;
constexpr int WARP_BARRIER_BYTES = CONTRIBUTORS > 1 ? 16 : 0;            // two mbarriers

using Total = Sum[GRANULES][GRANULE / 2];

// A lane's sums of the chunks that its warp owns; four per 8 tokens.
using Owned = Sum[MOST_CHUNKS * 2][4];

__device__ constexpr int first_chunk_of(int owner) { return (owner * CHUNKS + CONTRIBUTORS - 1) / CONTRIBUTORS; }
__device__ constexpr int chunks_of(int owner) { return first_chunk_of(owner + 1) - first_chunk_of(owner); }

// Sum e of the i-th 8 tokens of `owner`. The owner is known at run time only: this selects among registers.
__device__ inline Sum sum_for(const Total& total, int owner, int i, int e) {
  Sum chosen = 0;
#pragma unroll
  for (int o = 0; o < CONTRIBUTORS; ++o)
    if (i < chunks_of(o) * 2) {
      const int at = (first_chunk_of(o) * 2 + i) * 4 + e;
      const Sum sum = total[at / (GRANULE / 2)][at % (GRANULE / 2)];
      chosen = o == 0 || o == owner ? sum : chosen;
    }
  return chosen;
}

__device__ inline float4 packed_bits(const Sum (&t)[4]) {
  return make_float4(bits_of(t[0]), bits_of(t[1]), bits_of(t[2]), bits_of(t[3]));
}

__device__ inline void add_bits(Sum (&t)[4], float a, float b, float c, float d) {
  t[0] += sum_of(a), t[1] += sum_of(b), t[2] += sum_of(c), t[3] += sum_of(d);
}

__device__ inline void take_owned(Owned& owned, const Total& total, int owner) {
#pragma unroll
  for (int i = 0; i < MOST_CHUNKS * 2; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) owned[i][e] = sum_for(total, owner, i, e);
}

// One of the warps that share rows. slots: WARP_SLOTS_BYTES for each warp of a block. barriers: two mbarriers for each
// warp; `filled` completes when its slots have all sums, `taken` when all owners have read this warp's sums.
struct Contributors {
  uint32_t slots, barriers;
  int rank, tile, lane;  // rank: of the block in its cluster; tile: the warp of the block

  __device__ inline int chunks() const { return EVEN ? MOST_CHUNKS : chunks_of(rank); }
  __device__ inline int first_token() const { return first_chunk_of(rank) * CHUNK; }
  __device__ inline uint32_t filled() const { return barriers + tile * 16; }
  __device__ inline uint32_t taken() const { return filled() + 8; }
  __device__ inline uint32_t own_slots() const { return slots + tile * WARP_SLOTS_BYTES + lane * 16; }

  // Initialize all mbarriers of a block, by one thread; then all threads call cluster_arrive.
  static __device__ inline void initialize(uint32_t barriers) {
    for (int w = 0; w < TILES; ++w)
      mbarrier_init(barriers + w * 16, 1), mbarrier_init(barriers + w * 16 + 8, CONTRIBUTORS - 1);
    fence_mbarrier_init();
  }

  // Reduce all contributors' sums of the chunks that this warp owns. number: of earlier reductions; more: another
  // reduction follows.
  __device__ inline void reduce(Owned& owned, const Total& total, int number, bool more) const {
    if (number == 0) cluster_wait();  // other blocks have initialized their mbarriers
    else mbarrier_wait(taken(), (number - 1) & 1);
#pragma unroll
    for (int other = 1; other < CONTRIBUTORS; ++other) {
      const int owner = (rank + other) % CONTRIBUTORS, slot = rank < owner ? rank : rank - 1;
      const uint32_t to = map_shared_rank(own_slots() + slot * SLOT_BYTES, owner);
      const uint32_t barrier = map_shared_rank(filled(), owner);
      take_owned(owned, total, owner);
#pragma unroll
      for (int i = 0; i < MOST_CHUNKS * 2; ++i)
        if (EVEN || i / 2 < chunks_of(owner)) store_async(to + i * HALF_BYTES, packed_bits(owned[i]), barrier);
    }
    take_owned(owned, total, rank);
    if (lane == 0) mbarrier_arrive_expect_tx(filled(), (CONTRIBUTORS - 1) * chunks() * CHUNK_BYTES);
    __syncwarp();
    mbarrier_wait(filled(), number & 1);
#pragma unroll
    for (int slot = 0; slot < CONTRIBUTORS - 1; ++slot)
#pragma unroll
      for (int i = 0; i < MOST_CHUNKS * 2; ++i) {
        if (!EVEN && i / 2 >= chunks()) continue;
        const uint4 other = load_shared(own_slots() + slot * SLOT_BYTES + i * HALF_BYTES);
        add_bits(owned[i], __uint_as_float(other.x), __uint_as_float(other.y), __uint_as_float(other.z),
                 __uint_as_float(other.w));
      }
    __syncwarp();
    if (more && lane < CONTRIBUTORS && lane != rank) mbarrier_arrive_remote(taken(), lane);
  }

  // Store this warp's partial sums for the cluster that has the first groups of this output tile.
  __device__ inline void store_partial(const Owned& owned, float* warp_partials, [[maybe_unused]] int* flag,
                                       int launch) const {
#pragma unroll
    for (int i = 0; i < MOST_CHUNKS * 2; ++i) {
      if (!EVEN && i / 2 >= chunks()) continue;
      const float4 sums = packed_bits(owned[i]);
      if constexpr (MARKED) {
        Marked* to = reinterpret_cast<Marked*>(warp_partials) + i * 64 + lane;
        store_marked(to, Marked(sums.x, sums.y, launch)), store_marked(to + 32, Marked(sums.z, sums.w, launch));
      } else {
        reinterpret_cast<float4*>(warp_partials)[i * 32 + lane] = sums;
      }
    }
    if constexpr (!MARKED) {
      __syncwarp();
      if (lane == 0) release_flag(flag, launch);
    }
  }

  // Wait for another cluster's partial sums and add them.
  __device__ inline void add_partial(Owned& owned, const float* warp_partials, [[maybe_unused]] const int* flag,
                                     int launch) const {
    if constexpr (MARKED) {
#pragma unroll
      for (int first = 0; first < MOST_CHUNKS * 2; first += READ_AT_ONCE) {
        if (!EVEN && first / 2 >= chunks()) continue;
        Marked sums[READ_AT_ONCE * 2];
        const Marked* from = reinterpret_cast<const Marked*>(warp_partials) + first * 64 + lane;
        const auto last_is_ready = [&] { return load_marked(from + (READ_AT_ONCE * 2 - 1) * 32).has(launch); };
        while (!__all_sync(0xFFFFFFFFu, last_is_ready())) {  // one load per lane, to leave bandwidth to other warps
        }
        bool ready;
        do {
          ready = true;
#pragma unroll
          for (int i = 0; i < READ_AT_ONCE * 2; ++i) sums[i] = load_marked(from + i * 32);
#pragma unroll
          for (int i = 0; i < READ_AT_ONCE * 2; ++i) ready = ready && sums[i].has(launch);
        } while (!__all_sync(0xFFFFFFFFu, ready));
#pragma unroll
        for (int i = 0; i < READ_AT_ONCE; ++i)
          add_bits(owned[first + i], sums[2 * i].value(0), sums[2 * i].value(1), sums[2 * i + 1].value(0),
                   sums[2 * i + 1].value(1));
      }
    } else {
      if (lane == 0)
        while (acquire_flag(flag) != launch) {
        }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < MOST_CHUNKS * 2; ++i) {
        const float4 other = load_uncached(reinterpret_cast<const float4*>(warp_partials) + i * 32 + lane);
        add_bits(owned[i], other.x, other.y, other.z, other.w);
      }
    }
  }
};

// Scales of two adjacent tokens; past M_PAD zeros.
__device__ inline float2 load_scale_pair(const float* sx, int token, int m) {
  const int m_padded = (m + MMA_TOKENS - 1) / MMA_TOKENS * MMA_TOKENS;
  return token < m_padded ? load_written(reinterpret_cast<const float2*>(sx + token)) : make_float2(0.0f, 0.0f);
}

// Write a warp's 16 rows of the tokens that it owns, from first_token on, through its WARP_OUT_BYTES of shared memory,
// so that the 16 outputs of a token are written together.
__device__ inline void write_warp(const Owned& owned, int chunks, uint32_t out, const half_bits* bias, half_bits* y, int m,
                                  int n, int first_feature, int first_token, [[maybe_unused]] const float* sx,
                                  [[maybe_unused]] const FeatureScale* sn) {
  const int lane = threadIdx.x % 32;
  const bool wide = n % 8 == 0 && reinterpret_cast<uint64_t>(y) % 16 == 0;
  float b[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    b[i] = bias == nullptr ? 0.0f : half_to_float(bias[min(first_feature + lane / 4 + 8 * i, n - 1)]);
#if WHOLE_K
  float feature_scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) feature_scale[i] = feature_scale_of(sn[min(first_feature + lane / 4 + 8 * i, n - 1)]);
#endif
#pragma unroll
  for (int c = 0; c < MOST_CHUNKS; c += OUT_CHUNKS) {
#if WHOLE_K
    float2 token_scales[OUT_CHUNKS * 2];  // loaded once for both rows
#pragma unroll
    for (int j = 0; j < OUT_CHUNKS * 2; ++j)
      token_scales[j] = load_scale_pair(sx, first_token + (c * 2 + j) * MMA_TOKENS + lane % 4 * 2, m);
#endif
#pragma unroll
    for (int q = 0; q < OUT_CHUNKS; ++q) {
      if (c + q >= MOST_CHUNKS || (!EVEN && c + q >= chunks)) continue;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows 8 * (i % 2), tokens 8 * (i / 2)
        const int eight = (c + q) * 2 + i / 2;
        [[maybe_unused]] const int token = first_token + eight * 8 + lane % 4 * 2;
        const Sum* t = &owned[eight][i % 2 * 2];
        half_bits h[2];
#if WHOLE_K
        const float2 pair_scales = token_scales[eight - c * 2];
        h[0] = float_to_half(static_cast<float>(t[0]) * feature_scale[i % 2] * pair_scales.x + b[i % 2]);
        h[1] = float_to_half(static_cast<float>(t[1]) * feature_scale[i % 2] * pair_scales.y + b[i % 2]);
#else
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int inside = min(token + e, m - 1);
          h[e] = float_to_half(scaled_output(t[e], inside, 0, sx, sn) + b[i % 2]);
        }
#endif
        words[i] = h[0] | static_cast<uint32_t>(h[1]) << 16;
      }
      const uint32_t to = out + q * 512 + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
      stmatrix_transposed(to, words);
    }
    __syncwarp();
#pragma unroll
    for (int q = 0; q < OUT_CHUNKS; ++q) {
      if (c + q >= MOST_CHUNKS || (!EVEN && c + q >= chunks)) continue;
      const int token = first_token + (c + q) * CHUNK + lane / 2, feature = first_feature + lane % 2 * 8;
      const uint4 words = load_shared(out + q * 512 + lane * 16);
      if (token < m && feature < n) {
        half_bits* to = y + static_cast<long long>(token) * n + feature;
        if (wide) {
          *reinterpret_cast<uint4*>(to) = words;
        } else {
          const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (feature + i < n) to[i] = static_cast<half_bits>(word[i / 2] >> (i % 2 * 16));
        }
      }
    }
    __syncwarp();
  }
}
