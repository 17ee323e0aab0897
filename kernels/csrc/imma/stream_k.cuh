// imma/stream_k.cuh: stream-K for persistent thread blocks, one an SM: the division of the steps of K of output
// tiles among them, and the reduction of their partial sums.
//
// The including source defines TOKENS, TILES, GRANULES, GRANULE, WARPGROUPS, THREADS, SHARERS and STREAM_K first.
#pragma once
#include "imma/layout.cuh"
#include "ptx/synchronization.cuh"

constexpr int SHARE_FLOATS = THREADS * TOKENS / 2;  // of a block's partial sums

// The problem, as producer and consumers see it. An output is a tile: ROWS * SHARERS rows of one block of tokens.
struct Grid {
  int m, n, groups, steps, row_tiles, token_blocks, outputs;

  __device__ Grid(int m_, int n_, int k)
      : m(m_), n(n_), groups((k + GROUP - 1) / GROUP), steps(tiles_along(groups)),
        row_tiles((n + MMA_ROWS - 1) / MMA_ROWS), token_blocks((m + TOKENS - 1) / TOKENS) {
    const int row_blocks = (row_tiles + TILES - 1) / TILES;
    outputs = (row_blocks + SHARERS - 1) / SHARERS * token_blocks;
  }
  __device__ inline int first_token(int output) const { return output % token_blocks * TOKENS; }
  __device__ inline int first_tile(int output, int rank) const {
    return (output / token_blocks * SHARERS + rank) * TILES;
  }
};

// Steps from .. to - 1 of an output tile.
struct Part {
  int output, from, to;
};

// The work of a cluster: an equal share of the steps of the first `shared` output tiles, then every clusters-th
// of the others. The launcher divides, so that values stay uniform over a warp: a share is `each` steps, one more
// for the first `longer`; inverse is 2^32 / steps, rounded up.
struct Shares {
  int shared, each, longer;
  uint32_t inverse;
};

// Parts of a cluster's work by number, recomputed from few values to save registers.
struct Parts {
  const Grid& grid;
  const Shares& shares;
  int cluster;

  __device__ inline int begin_of(int of_cluster) const {
    return of_cluster * shares.each + min(of_cluster, shares.longer);
  }
  // Whether there is part `number`.
  __device__ inline bool find(Part& part, int number) const {
    part.from = 0, part.to = grid.steps;
    if constexpr (STREAM_K) {
      const int begin = begin_of(cluster), end = begin_of(cluster + 1);
      if (begin < end) {
        const int first = __umulhi(begin, shares.inverse), last = __umulhi(end - 1, shares.inverse);
        part.output = first + number;
        if (number == 0) part.from = begin - first * grid.steps;
        if (part.output == last) part.to = end - last * grid.steps;
        if (part.output <= last) return true;
        number -= last - first + 1;
      }
    }
    part.output = shares.shared + cluster + number * static_cast<int>(gridDim.x / SHARERS);
    return part.output < grid.outputs;
  }
};

// Store a warpgroup's partial sums of 64 rows, for the block that has the first groups of this output tile; then
// set `flag` to the number of this launch.
__device__ inline void store_partial_sums(const Sum (&total)[GRANULES][GRANULE / 2], float* share, int* flag,
                                          int launch, int barrier) {
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i += 4) {
    const Sum* t = &total[i / (GRANULE / 2)][i % (GRANULE / 2)];
    reinterpret_cast<float4*>(share)[i / 4 * THREADS + threadIdx.x] =
        make_float4(bits_of(t[0]), bits_of(t[1]), bits_of(t[2]), bits_of(t[3]));
  }
  named_barrier_sync(barrier, 128);
  if (threadIdx.x % 128 == 0) release_flag(flag, launch);
}

// Wait for `flag` and add another block's partial sums.
__device__ inline void add_partial_sums(Sum (&total)[GRANULES][GRANULE / 2], const float* share, const int* flag,
                                 int launch, int barrier) {
  if (threadIdx.x % 128 == 0)
    while (acquire_flag(flag) != launch) {
    }
  named_barrier_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i += 4) {
    const float4 other = load_uncached(reinterpret_cast<const float4*>(share) + i / 4 * THREADS + threadIdx.x);
    Sum* t = &total[i / (GRANULE / 2)][i % (GRANULE / 2)];
    t[0] += sum_of(other.x), t[1] += sum_of(other.y), t[2] += sum_of(other.z), t[3] += sum_of(other.w);
  }
}
