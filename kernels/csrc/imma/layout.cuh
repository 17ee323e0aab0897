// imma/layout.cuh: layout of 6- and 4-bit weights for 8-bit tensor cores, and their dequantization in registers.
//
// A tile is 16 rows of W and one group of 128 k: the sixteen A operand words that each of a warp's 32
// lanes needs for four mma.m16n8k32. Tiles of the same rows are consecutive along K, so a block
// streams one contiguous range. Scales are stored separately, so that every tile starts on a cache line.
//
//   W_BITS 6   bytes    0 .. 1535   uint4 [3][32 lanes]: twelve words, three for the four operand words of an MMA
//   W_BITS 4   bytes    0 .. 1023   uint4 [2][32 lanes]: eight words, a nibble a weight
//   scales     uint32 [8] a tile, one for rows r and r + 8 together
//              two halves; DUAL_GRAINED: bytes scale, zero point, scale, zero point, each int8; W_BITS 6: two
//              integers of 16 bits; W_EXPONENT_BITS: two bytes for each lane
//
// Lane l holds rows l/4 and l/4 + 8 and the 32 adjacent k from 32·(l%4). This permutation of k does not
// change sums, and makes a lane's activations 32 adjacent bytes of a token's row.
// Operand word o (0 .. 15) belongs to MMA o/4 as its register o%4: row l/4 + 8·(o%2), k from
// 32·(l%4) + 8·(o/4) + 4·(o%4/2).
//   W_BITS 6   o%4 < 3: the upper six bits of each byte of word 3·(o/4) + o%4. o%4 = 3: the lower two bits of each
//              byte of these three words, the highest first. Three of four operands take one AND, all four take
//              nine instructions. DUAL_GRAINED: the lower six bits and the upper two, with as many instructions
//   W_BITS 4   word 2·(o/4) + o%2, in the upper nibbles where o%4 >= 2. A word is eight adjacent k of a row,
//              and the words themselves are A operands of the int4 tensor core.
//
// The code is in the top bits of a byte: the operand is 4·code or 16·code, so no sign extension is needed,
// and the sums are divided by the factor once, in the epilogue.
//
// INT8_TAIL (Atom, arXiv 2310.19102): the last group has codes of 8 bits, in two tiles of nibbles. A code
// is 16·a + b + 8 with a and b in -8 .. 7. The first tile has a and makes the operand 16·a + 8, the second
// has b and makes 16·b, whose scale is a sixteenth.
//
// INT4_MMA: groups with 4-bit codes of weights and activations are multiplied by mma.m16n8k64.s4, without
// conversion of weights; activations are packed to nibbles in registers. Hopper and later have no int4
// tensor core and would emulate it at a fortieth of the int8 rate.
//
// DUAL_GRAINED (DGQ, arXiv 2310.04836): nibbles are unsigned; the operand is scale·(nibble + zero point),
// which the packer keeps within int8. Four are computed by one multiplication and one addition of words: with
// 128 added, each byte is in 0 .. 255, so none carries into the next. 6 bits: the same with a scale of 1 .. 4
// and a zero point of -32 everywhere, so that scale·code always fits.
//
// W_EXPONENT_BITS 2 (E2M3) or 3 (E3M2): MXFP6 weights for FP8 tensor cores. A block of 32 k is a lane's. An operand word
// is made of two pairs of halves, each the sum modulo 2 of two of the MMA's three words, shifted, for which the packing
// solves: masked, the numbers times 2^-14 or 2^-12. They are multiplied by the block's scale, a power of two of which
// the upper byte is stored, the largest 2^15 in each row, and E2M3 is rounded to E4M3, exactly up to seven octaves below.
// E3M2 is E5M2 without a conversion: the upper byte, exact up to 15 octaves below.
#pragma once
#include "common/half_pairs.cuh"
#include "imma/mma_order.cuh"
#include "ptx/memory.cuh"

#ifndef W_BITS
#define W_BITS 6
#endif
#ifndef INT8_TAIL
#define INT8_TAIL 0
#endif
#ifndef DUAL_GRAINED
#define DUAL_GRAINED 0
#endif
#ifndef W_EXPONENT_BITS
#define W_EXPONENT_BITS 0
#endif
#if W_EXPONENT_BITS == 2
#define WGMMA_FLOATS "e4m3"
#elif W_EXPONENT_BITS == 3
#define WGMMA_FLOATS "e5m2"
#endif
// The tensor cores accumulate over all of K, and output features have a scale.
#define WHOLE_K (DUAL_GRAINED || W_EXPONENT_BITS)
#ifndef INT4_MMA
#define INT4_MMA (INT8_TAIL && __CUDA_ARCH__ < 900)
#endif
#ifndef A_GROUPED
#define A_GROUPED !WHOLE_K
#endif
static_assert(W_BITS == 6 || W_BITS == 4, "W_BITS must be 6 or 4");
static_assert(W_BITS == 4 || !INT8_TAIL, "INT8_TAIL needs W_BITS 4");
static_assert(!WHOLE_K || !A_GROUPED, "WHOLE_K needs A_GROUPED 0: one scale per token for all of K");
static_assert(!W_EXPONENT_BITS || (W_BITS == 6 && !DUAL_GRAINED), "W_EXPONENT_BITS needs W_BITS 6");

constexpr int GROUP = 128;  // values of k that share one scale
constexpr int MMA_ROWS = 16, MMA_TOKENS = 8, MMA_K = 32;
constexpr int MMAS = GROUP / MMA_K;     // per group
constexpr int OPERAND_WORDS = 4 * MMAS;
constexpr int INT4_MMAS = GROUP / 64;   // int4 MMAs per group
constexpr int TILE_BYTES = MMA_ROWS * GROUP * W_BITS / 8;
constexpr int LANE_WORDS = TILE_BYTES / 32 / 4;  // of a lane in a tile
constexpr int LANE_K = 32;              // adjacent k of a lane
// Factor that turns sums of operands into sums of codes, or with DUAL_GRAINED of scale·(code + zero point).
constexpr float OPERAND_UNIT = WHOLE_K ? 1.0f : W_BITS == 6 ? 0.25f : 0.0625f;
constexpr int SCALE_BYTES = MMA_ROWS * (W_EXPONENT_BITS ? GROUP / LANE_K : 2);  // of a tile
static_assert(TILE_BYTES % 128 == 0, "TILE_BYTES must be a multiple of a cache line");

// Number of tiles along K, and the group of a tile.
__device__ inline int tiles_along(int groups) { return groups + INT8_TAIL; }
__device__ inline int group_of(int tile, [[maybe_unused]] int groups) {
  return INT8_TAIL ? min(tile, groups - 1) : tile;
}

// Type of an accumulator over K: scaled sums of groups or of floats, or integers over all of K. Reductions through
// shared memory exchange its bits.
#if DUAL_GRAINED
using Sum = int;
__device__ inline float bits_of(Sum sum) { return __int_as_float(sum); }
__device__ inline Sum sum_of(float bits) { return __float_as_int(bits); }
#else
using Sum = float;
__device__ inline float bits_of(Sum sum) { return sum; }
__device__ inline Sum sum_of(float bits) { return bits; }
#endif

// Scale of an output feature.
#if W_EXPONENT_BITS
using FeatureScale = float;
__device__ inline float feature_scale_of(FeatureScale scale) { return scale; }
#else
using FeatureScale = half_bits;
__device__ inline float feature_scale_of(FeatureScale scale) { return half_to_float(scale); }
#endif

// The scales in a tile of a lane's rows, from shared memory.
__device__ inline uint32_t load_lane_scales(uint32_t shared, int lane) {
  return W_EXPONENT_BITS ? load_shared_half(shared + lane * 2) : load_shared_word(shared + lane / 4 * 4);
}

// Scaling in the epilogue of every kernel: by sx if a token has one scale, by sn if WHOLE_K.
__device__ inline float scaled_output(Sum sum, int token, int feature, [[maybe_unused]] const float* sx,
                                      [[maybe_unused]] const FeatureScale* sn) {
  float value = static_cast<float>(sum) * OPERAND_UNIT;
  if constexpr (WHOLE_K) value *= feature_scale_of(sn[feature]);
  if constexpr (!A_GROUPED) value *= load_written(sx + token);
  return value;
}

// The weights and scales of one lane in one tile.
struct WeightTile {
  uint32_t words[LANE_WORDS];
#if W_EXPONENT_BITS
  uint32_t factor[2];             // of rows lane/4 and lane/4 + 8: two equal halves
#elif DUAL_GRAINED
  uint32_t factor[2], offset[2];  // of rows lane/4 and lane/4 + 8
#else
  float scale[2];
#endif
#if INT8_TAIL
  uint32_t filler;  // the lower nibble of each operand byte
#endif

  // scales: of this lane's rows. upper_tail: this tile is the first of the two of an INT8_TAIL.
  __device__ inline WeightTile(uint32_t shared, uint32_t scales, int lane, bool upper_tail) {
#pragma unroll
    for (int i = 0; i < LANE_WORDS; i += 4) {
      const uint4 v = load_shared(shared + i * 128 + lane * 16);
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
    set_scales(scales, upper_tail);
  }

  // Without words: for a tile that was widened before.
  __device__ inline explicit WeightTile(uint32_t scales, bool upper_tail) { set_scales(scales, upper_tail); }

  __device__ inline void set_scales(uint32_t scales, [[maybe_unused]] bool upper_tail) {
#if W_EXPONENT_BITS
    factor[0] = __byte_perm(scales, 0, 0x0404), factor[1] = __byte_perm(scales, 0, 0x1414);
#elif DUAL_GRAINED
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#if W_BITS == 6
      factor[i] = i == 0 ? scales & 0xFFFFu : scales >> 16, offset[i] = 0x80808080u - factor[i] * 0x20202020u;
#else
      const int s = static_cast<int8_t>(scales >> (16 * i)), zero = static_cast<int8_t>(scales >> (16 * i + 8));
      factor[i] = s, offset[i] = static_cast<uint32_t>(s * zero + 128) * 0x01010101u;
#endif
    }
#else
    scale[0] = half_to_float(static_cast<half_bits>(scales));
    scale[1] = half_to_float(static_cast<half_bits>(scales >> 16));
#endif
#if INT8_TAIL
    filler = upper_tail ? 0x08080808u : 0u;
    if (upper_tail) scale[0] *= 16.0f, scale[1] *= 16.0f;
#endif
  }

#if INT4_MMA
  // A operand registers of int4 MMA q. Its sums are of codes, not of 16 times the codes.
  __device__ inline void nibble_operands(uint32_t (&a)[4], int q) const {
#pragma unroll
    for (int o = 0; o < 4; ++o) a[o] = words[4 * q + o];
  }
#endif

#if DUAL_GRAINED
  // Four int8 operands of row lane/4 + 8 * row from their unsigned codes.
  __device__ inline uint32_t scaled(uint32_t codes, int row) const {
    return (codes * factor[row] + offset[row]) ^ 0x80808080u;
  }
#endif

#if W_EXPONENT_BITS
  // The A operand registers of an MMA from its three words.
  __device__ inline void float_operands(uint32_t (&a)[4], uint32_t u, uint32_t v, uint32_t w) const {
    constexpr uint32_t BITS = W_EXPONENT_BITS == 2 ? 0x8F808F80u : 0x9F009F00u;
    constexpr int FEW = 3 + W_EXPONENT_BITS, MANY = FEW + 2;
    const uint32_t u1 = u << FEW, v1 = v << FEW, w1 = w << FEW, u2 = u << MANY, v2 = v << MANY, w2 = w << MANY;
    const uint32_t halves[8] = {w ^ w1, w2 ^ u, u1 ^ v, v2 ^ u1, u2 ^ v1, w >> 3 ^ u2, v >> 3 ^ w1, w2 ^ u >> 3};
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const uint32_t low = multiply_half2(halves[2 * o] & BITS, factor[o % 2]);
      const uint32_t high = multiply_half2(halves[2 * o + 1] & BITS, factor[o % 2]);
#if W_EXPONENT_BITS == 2
      a[o] = e4m3_of(low, high);
#else
      a[o] = __byte_perm(low, high, 0x7531);
#endif
    }
  }
#endif

#if DUAL_GRAINED && W_BITS == 6
  // Four codes of A operand register o, with 32 added.
  __device__ inline uint32_t unsigned_codes(int o) const {
    const uint32_t* mma_words = words + o / 4 * 3;
    if (o % 4 < 3) return mma_words[o % 4] & 0x3F3F3F3Fu;
    const uint32_t first_two = selected_bits<0xC0C0C0C0u>(mma_words[0], mma_words[1] >> 2);
    return selected_bits<0xF0F0F0F0u>(first_two, mma_words[2] >> 4) >> 2 & 0x3F3F3F3Fu;
  }
#endif

#if !W_EXPONENT_BITS
  // One A operand register of MMA o/4; o is a compile-time constant after unrolling.
  __device__ inline uint32_t operand(int o) const {
#if W_BITS == 6
#if DUAL_GRAINED
    return scaled(unsigned_codes(o), o % 2);
#else
    const uint32_t* mma_words = words + o / 4 * 3;
    if (o % 4 < 3) return mma_words[o % 4] & 0xFCFCFCFCu;
    const uint32_t upper = selected_bits<0xC0C0C0C0u>(mma_words[0] << 6, mma_words[1] << 4);
    return selected_bits<0xF0F0F0F0u>(upper, mma_words[2] << 2) & 0xFCFCFCFCu;
#endif
#else
    const uint32_t word = words[o / 4 * 2 + o % 2];
    const bool is_upper = o % 4 >= 2;
#if DUAL_GRAINED
    const uint32_t codes = (is_upper ? word >> 4 : word) & 0x0F0F0F0Fu;
    return scaled(codes, o % 2);
#elif INT8_TAIL
    return ((is_upper ? word : word << 4) & 0xF0F0F0F0u) | filler;
#else
    return (is_upper ? word : word << 4) & 0xF0F0F0F0u;
#endif
#endif
  }
#endif

  // All A operands of the tile, four for each MMA.
  __device__ inline void widen(uint32_t (&a)[MMAS][4]) const {
#pragma unroll
#if W_EXPONENT_BITS
    for (int i = 0; i < MMAS; ++i) float_operands(a[i], words[3 * i], words[3 * i + 1], words[3 * i + 2]);
#else
    for (int o = 0; o < OPERAND_WORDS; ++o) a[o / 4][o % 4] = operand(o);
#endif
  }
};

// A lane's 32 adjacent k of one token, in natural order. (For WGMMA, tokens are in that of imma/mma_order.cuh.)
struct TokenCodes {
  uint4 half[2];

  // B operand registers of MMA i.
  __device__ inline void operand(uint32_t (&b)[2], int i) const {
    const uint4& t = half[i / 2];
    b[0] = i % 2 == 0 ? t.x : t.z;
    b[1] = i % 2 == 0 ? t.y : t.w;
  }

  // B operand registers of int4 MMA q: nibbles in the order of those of the weights.
  __device__ inline void nibbles(uint32_t (&b)[2], int q) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t bytes[2];
      operand(bytes, 2 * q + h);
      b[h] = selected_bits<0x0F0F0F0Fu>(bytes[0], bytes[1] << 4);
    }
  }
};
