// imma/stream_k.cuh: stream-K for persistent thread blocks, one per SM: the assignment of output tiles and steps of K
// to clusters, and the state of their pipeline. warp_sums.cuh reduces the partial sums.
//
// The including source defines TOKENS, TILES, STAGES, SHARERS and STREAM_K first.
#pragma once
#include "imma/layout.cuh"

// Index and mbarrier phase parity of a pipeline stage.
struct PipelineState {
  int index = 0;
  uint32_t parity = 0;

  __device__ inline void next() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
};

// The problem shape in tiles. An output tile is TILES * 16 * SHARERS rows of one block of tokens.
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

// A work unit: steps from .. to - 1 of an output tile.
struct Part {
  int output, from, to;
};

// A cluster computes an equal share of the steps of the first `shared` output tiles, then whole output tiles, assigned
// round-robin. The launcher computes these values, so that they are uniform over a warp: a share is `each` steps, one
// more for the first `longer` clusters; inverse is 2^32 / steps, rounded up.
struct Shares {
  int shared, each, longer;
  uint32_t inverse;
};

// Work units of a cluster by number, recomputed from few values to save registers.
struct Parts {
  const Grid& grid;
  const Shares& shares;
  int cluster;

  __device__ inline int begin_of(int index) const {
    return index * shares.each + min(index, shares.longer);
  }
  // Compute work unit `number`; false if there is none.
  __device__ inline bool get(Part& part, int number) const {
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
