// imma/stream_k.cuh: stream-K for persistent thread blocks, one an SM: the division of the steps of K of output
// tiles among them. warp_sums.cuh reduces their partial sums.
//
// The including source defines TOKENS, TILES, SHARERS and STREAM_K first.
#pragma once
#include "imma/layout.cuh"

// The problem, as producer and consumers see it. An output is a tile: ROWS * SHARERS rows of one block of tokens.
struct Grid {
  int m, n, groups, steps, row_tiles, token_blocks, outputs;

  __device__ Grid(int m_, int n_, int k)
      : m(m_), n(n_), groups((k + GROUP - 1) / GROUP), steps(tiles_along(groups)),
        row_tiles((n + MMA_ROWS - 1) / MMA_ROWS), token_blocks((m + TOKENS - 1) / TOKENS) {
    const int row_blocks = (row_tiles + TILES - 1) / TILES;
    outputs = (row_blocks + SHARERS - 1) / SHARERS * token_blocks;
  }
  __device__ inline int first_token(int output) const {
    return token_blocks == 1 ? 0 : output % token_blocks * TOKENS;
  }
  __device__ inline int first_tile(int output, int rank) const {
    return ((token_blocks == 1 ? output : output / token_blocks) * SHARERS + rank) * TILES;
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
