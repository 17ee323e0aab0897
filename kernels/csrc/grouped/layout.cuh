// grouped/layout.cuh: weights of experts for int8 tensor cores: 6- and 4-bit codes with integer scales of groups
// (DUAL_GRAINED of imma/layout.cuh), and int8.
//
// A tile is 16 rows of W and one group of 128 k: the A operands of four mma.m16n8k32, k in natural order. Lane l has
// rows l/4 and l/4 + 8, and of MMA i the k 32·i + 4·(l%4) and those 16 later. Its operand words are packed as in
// imma/layout.cuh: the four of an MMA in MMA_WORDS words.
//   whole tile         uint4 [LANE_WORDS / 4][32 lanes]
//   last tile along K  only MMAs with k < K, uint32 [MMAs · MMA_WORDS][32 lanes], unless it is whole
// A chunk is the tiles of up to BLOCK_TILES adjacent row tiles and one group, then their scales. The chunks of a row
// block are consecutive, so that one copy loads adjacent groups; row blocks and experts follow each other.
//   scales of a tile   W_BITS 6: uint8 [8][2], of rows r and r + 8; 4: int8 [8][2][2], scale, and scale times zero
//                      point; 8: none
//   HALF_SCALES 1      W_BITS 6 of FlexQ: half [8][2]; tiles without DUAL_GRAINED. Activations have scales of groups, too
//
// ELEMENT 1: FP16, 2: BF16. Weights and activations are read as two bytes for each value: k, N x K and a group count bytes,
// and a tile is the A operands of four mma.m16n8k16. There are no scales.
// BFLOAT 1: outputs are BF16; those of ELEMENT 2 always are.
// The including source defines ROW_BLOCKS first.
#pragma once
#ifndef W_BITS
#error "define W_BITS"
#endif
#ifndef ELEMENT
#define ELEMENT 0
#endif
#ifndef BFLOAT
#define BFLOAT (ELEMENT == 2)
#endif
#ifndef HALF_SCALES
#define HALF_SCALES 0
#endif
static_assert(!HALF_SCALES || W_BITS == 6, "HALF_SCALES needs W_BITS 6");
static_assert(ELEMENT == 0 || W_BITS == 8, "FP16 and BF16 values are pairs of bytes: W_BITS must be 8");
#if W_BITS == 8
#include "ptx/types.cuh"
constexpr int GROUP = 128, MMA_ROWS = 16, MMA_TOKENS = 8, MMA_K = 32, MMAS = GROUP / MMA_K;
constexpr int OPERAND_WORDS = 4 * MMAS, LANE_WORDS = OPERAND_WORDS;
#if ELEMENT == 0
using Sum = int;
__device__ inline float bits_of(Sum sum) { return __int_as_float(sum); }
__device__ inline Sum sum_of(float bits) { return __float_as_int(bits); }
#else
using Sum = float;
__device__ inline float bits_of(Sum sum) { return sum; }
__device__ inline Sum sum_of(float bits) { return bits; }
#endif
#else
#define DUAL_GRAINED !HALF_SCALES
#include "imma/layout.cuh"
#endif
#include "ptx/memory.cuh"

__device__ inline half_bits output_bits(float value) { return BFLOAT ? float_to_bfloat(value) : float_to_half(value); }

constexpr int BLOCK_TILES = 4, BLOCK_ROWS = BLOCK_TILES * MMA_ROWS;
constexpr int MMA_WORDS = LANE_WORDS / MMAS, MMA_BYTES = MMA_WORDS * 32 * 4;
constexpr int WHOLE_TILE_BYTES = MMAS * MMA_BYTES;
constexpr int TILE_SCALE_BYTES = W_BITS == 8 ? 0 : MMA_ROWS * (W_BITS == 6 && !HALF_SCALES ? 1 : 2);
constexpr int CHUNK_BYTES = BLOCK_TILES * (WHOLE_TILE_BYTES + TILE_SCALE_BYTES);

// Sizes of an expert's weights. rows_of_outputs: output tiles along N, of ROW_BLOCKS row blocks each.
struct Expert {
  int n, row_tiles, rows_of_outputs, steps, last_mmas;

  __device__ inline Expert(int n_, int k)
      : n(n_), row_tiles((n_ + MMA_ROWS - 1) / MMA_ROWS),
        rows_of_outputs((row_tiles + ROW_BLOCKS * BLOCK_TILES - 1) / (ROW_BLOCKS * BLOCK_TILES)),
        steps((k + GROUP - 1) / GROUP), last_mmas((k - (steps - 1) * GROUP + MMA_K - 1) / MMA_K) {}

  __device__ inline int tiles_of(int row_block) const { return max(0, min(BLOCK_TILES, row_tiles - row_block * BLOCK_TILES)); }
  __device__ inline int mmas_of(int step) const { return step == steps - 1 ? last_mmas : MMAS; }
  // Bytes of a row tile's groups before `step`.
  __device__ inline int bytes_before(int step) const {
    const int bytes = step * (WHOLE_TILE_BYTES + TILE_SCALE_BYTES);
    return step == steps ? bytes - (MMAS - last_mmas) * MMA_BYTES : bytes;
  }
  // Byte at which a row block begins, of all experts.
  __device__ inline long long begin_of(int expert, int row_block) const {
    return (static_cast<long long>(expert) * row_tiles + row_block * BLOCK_TILES) * bytes_before(steps);
  }
};

// Where a lane's weights and scales of a whole tile are in a chunk of `tiles` tiles.
struct LanePlace {
  uint32_t weights, scales;

  __device__ inline LanePlace(int tile, int tiles, int lane)
      : weights(tile * WHOLE_TILE_BYTES + lane * 16),
        scales(tiles * WHOLE_TILE_BYTES + tile * TILE_SCALE_BYTES + lane / 4 * (TILE_SCALE_BYTES / 8)) {}
};

// A lane's packed weights of a tile.
struct PackedTile {
  uint32_t words[LANE_WORDS];
  [[maybe_unused]] uint32_t scales;

  __device__ inline void load_scales([[maybe_unused]] uint32_t at) {
#if W_BITS != 8
    scales = TILE_SCALE_BYTES == MMA_ROWS ? load_shared_half(at) : load_shared_word(at);
#endif
  }

  // chunk: in shared memory, of `tiles` tiles with `mmas` MMAs. Operands of further MMAs are any integers, or zeros of
  // FP16 and BF16.
  __device__ inline void load(uint32_t chunk, const LanePlace& place, int tile, int tiles, int mmas, int lane) {
    if (mmas == MMAS) {
      load_scales(chunk + place.scales);
#pragma unroll
      for (int i = 0; i < LANE_WORDS; i += 4) {
        const uint4 v = load_shared(chunk + place.weights + i * 128);
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
      }
    } else {
      const uint32_t missing = (MMAS - mmas) * MMA_BYTES;  // of a tile
      load_scales(chunk + place.scales - tiles * missing);
#pragma unroll
      for (int i = 0; i < LANE_WORDS; ++i)
        words[i] = i < mmas * MMA_WORDS ? load_shared_word(chunk + place.weights - tile * missing - lane * 12 + i * 128) : 0u;
    }
  }

  __device__ inline void operands(uint32_t (&a)[MMAS][4]) const {
#if W_BITS == 8
#pragma unroll
    for (int o = 0; o < OPERAND_WORDS; ++o) a[o / 4][o % 4] = words[o];
#else
    WeightTile tile(W_BITS == 6 && !HALF_SCALES ? __byte_perm(scales, 0, 0x4140) : scales, false);
#if W_BITS == 4
    tile.factor[0] = static_cast<int8_t>(scales), tile.factor[1] = static_cast<int8_t>(scales >> 16);
    const uint32_t unsigned_offsets = scales ^ 0x80008000u;
    tile.offset[0] = __byte_perm(unsigned_offsets, 0, 0x1111), tile.offset[1] = __byte_perm(unsigned_offsets, 0, 0x3333);
#endif
#pragma unroll
    for (int i = 0; i < LANE_WORDS; ++i) tile.words[i] = words[i];
    tile.widen(a);
#endif
  }
};
