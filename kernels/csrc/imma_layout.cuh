// imma_layout.cuh: how 6-bit weights lie in memory for int8 tensor cores.
//
// A tile is 16 rows of W and one group of 128 k: the sixteen A operand words that each of a warp's 32
// lanes needs for four mma.m16n8k32. Tiles of the same rows follow each other along K, so a block
// streams one contiguous range. Scales lie apart, so that every tile starts on a cache line.
//
//   tile   bytes    0 .. 1023   high plane, code >> 2:  uint4 [2][32 lanes], a nibble a weight
//          bytes 1024 .. 1535   low plane, code & 3:    uint4 [32 lanes], two bits a weight
//   scales half [8][2] a tile: of rows r and r + 8
//
// Lane l holds rows l/4 and l/4 + 8 and the 32 neighbouring k from 32·(l%4): a sum over k may be taken
// in any order, and this one makes a lane's activations 32 neighbouring bytes of a token's row.
// Operand word o (0 .. 15) belongs to MMA o/4 as its register o%4: row l/4 + 8·(o%2), k from
// 32·(l%4) + 8·(o/4) + 4·(o%4/2). It lies in high word o/2, in the upper nibbles where o is even, and
// in field o%4 of low word o/4.
//
// The six bits go to the top of a byte: the operand is 4·code, so no sign extension is needed, and the
// 4 is divided out once at the end.
#pragma once
#include "ptx.cuh"

constexpr int W_BITS = 6, GROUP = 128;  // GROUP: values of k that share one scale
constexpr int MMA_ROWS = 16, MMA_TOKENS = 8, MMA_K = 32;
constexpr int MMAS = GROUP / MMA_K;     // to cross a group
constexpr int OPERAND_WORDS = 4 * MMAS;
constexpr int HIGH_BYTES = 1024, LOW_BYTES = 512, TILE_BYTES = HIGH_BYTES + LOW_BYTES;
constexpr int LANE_K = 32;              // neighbouring k of a lane
static_assert(TILE_BYTES == MMA_ROWS * GROUP * W_BITS / 8, "six bits a weight");
static_assert(TILE_BYTES % 128 == 0, "a tile is whole cache lines");

// Tokens lie with k in its own order, or, for tensor cores that read them from shared memory, in the
// order of the MMA: where the four k of word `natural` of a group's 32 lie then.
__device__ inline int mma_word(int natural) {
  return natural % 8 / 2 * 8 + natural % 2 * 4 + natural / 8;
}

struct WeightTile {
  uint32_t high[8], low[4];

  // One A operand register of MMA o/4; o is a compile-time constant after unrolling.
  __device__ inline uint32_t operand(int o) const {
    const uint32_t upper = o % 2 == 0 ? high[o / 2] : high[o / 2] << 4;
    const uint32_t fields = low[o / 4];
    const uint32_t lower = o % 4 == 0 ? fields << 2 : fields >> (2 * (o % 4) - 2);
    return (upper & 0xF0F0F0F0u) | (lower & 0x0C0C0C0Cu);
  }
};

__device__ inline WeightTile read_tile(uint32_t shared, int lane) {
  WeightTile tile;
  const uint4 a = load_shared(shared + lane * 16), b = load_shared(shared + 512 + lane * 16);
  const uint4 c = load_shared(shared + HIGH_BYTES + lane * 16);
  tile.high[0] = a.x, tile.high[1] = a.y, tile.high[2] = a.z, tile.high[3] = a.w;
  tile.high[4] = b.x, tile.high[5] = b.y, tile.high[6] = b.z, tile.high[7] = b.w;
  tile.low[0] = c.x, tile.low[1] = c.y, tile.low[2] = c.z, tile.low[3] = c.w;
  return tile;
}

// B operand registers of MMA i, from a lane's 32 neighbouring k of one token.
struct TokenCodes {
  uint4 half[2];

  __device__ inline void operand(uint32_t (&b)[2], int i) const {
    const uint4& t = half[i / 2];
    b[0] = i % 2 == 0 ? t.x : t.z;
    b[1] = i % 2 == 0 ? t.y : t.w;
  }
};
