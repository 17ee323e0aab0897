// weight_only/layout.cuh: layout of weights of 4, 5, 6 and 8 bits for FP16 tensor cores, and their dequantization to
// halves in registers. The including source defines W_BITS and BIAS_SHIFT first.
//
// A tile is 16 rows and 128 k: the A operands that a warp needs for eight mma.m16n8k16. Lane l holds rows
// l/4 and l/4 + 8 and, of each 32 adjacent k, the eight from 8·(l%4): in this permutation of k, which does
// not change sums, four lanes read 64 adjacent bytes of a token. MMA i takes the k from
// 32·(i/2) + 8·(l%4) + 4·(i%2); its operand register o holds row l/4 + 8·(o%2), the first two of these k
// where o < 2 and the last two otherwise.
//   W_BITS 8   uint4 [4][32 lanes]: bytes code + 128; word 2i + o/2 of a lane has register o of MMA i in its
//              bytes 2·(o%2) and 2·(o%2) + 1
//   W_BITS 4   uint4 [2][32 lanes]: nibbles code + 8; word i of a lane has register o of MMA i in its
//              nibbles o and o + 4
//   W_BITS 6   E3M2 and
//   W_BITS 5   E3M1 numbers in two planes, "4+2" and "4+1" (ZeroQuant(4+2), arXiv 2312.08583)
//   EXPONENT_BITS 2   E2M1 numbers of W_BITS 4, E2M3 of W_BITS 6
//   EXPONENT_BITS 4   E4M3 numbers of W_BITS 8
//
// Integers are converted exactly: 0x6400 | u is the half 1024 + u, and one subtraction (or, for the upper
// nibbles, one fused multiply-add) gives the code. The same instruction subtracts a zero point.
//
// A float s eee mm becomes the upper byte s00eeemm of a half: the exponent is in the lowest exponent bits and
// the mantissa in the highest mantissa bits. This half is the number times 2^-12, also if subnormal, because
// the exponent biases are 3 and 15. Scales are multiplied by 2^12. Quad q = 2i + h of a lane is four such
// bytes of row l/4 + 8h: bytes 0 and 2 are register h of MMA i, bytes 1 and 3 register h + 2.
//   high plane  uint4 [2][32 lanes], eeem: exponent and upper mantissa bit. Word q/2 has them in bits 4 .. 1
//               of each byte; where q is odd, after rotating it right by 4.
//   low plane   6: uint4 [32 lanes], sign and lower mantissa bit. Word q/4 has them in bits 7 and 0 of each
//               byte, after rotating it right by 2·(q%4).
//               5: uint2 [32 lanes], signs. Word q/8 has them in bit 7 of each byte, after shifting it left
//               by q%8.
// Sign and exponent are not adjacent in these bytes, so a plane of the two would need more shifts; with these
// planes, one shift and one bitwise select give four weights.
//
// EXPONENT_BITS 2: the half is the number times 2^-14, sign in bit 15, exponent in bits 11 and 10, mantissa below.
//   W_BITS 4   uint4 [2][32 lanes]: word i of a lane has the registers of MMA i, of which only the upper bytes of halves
//              are not zero. Those of registers 1 and 0 alternate in the word, in place; those of 3 and 2 in its bits in
//              reverse order, where they find the others free
//   W_BITS 6   uint4 [3][32 lanes]: words 2j, 2j + 1 and 8 + j of a lane have the registers of MMAs 2j and 2j + 1. Each is
//              the sum modulo 2 of at most two of these words, rotated: the packing solves for them
//
// EXPONENT_BITS 4: the half is the number times 2^-8, sign in bit 15, exponent and mantissa in bits 13 .. 7.
//   W_BITS 8   uint4 [4][32 lanes]: word 2i + o/2 of a lane has register o of MMA i where o is even; that of o + 1 has
//              its exponents and mantissas in bits 6 .. 0 and its signs in bit 14
//
// GROUPED with BLOCK_K below 128: the scales of a tile's blocks follow its codes, so that they are loaded with them.
//   SCALES 0   FP16: uint32 [8][128 / BLOCK_K], lane quads, blocks: rows r and r + 8; ZEROS: two words, as for gemm.cu
//   SCALES 1   E8M0, BLOCK_K 32: bytes [8][2][4], lane quads, rows r and r + 8, blocks
//   SCALES 2   E4M3, BLOCK_K 16: bytes [8][2][2][4], lane quads, halves of 32 k, rows r and r + 8, of which 32 k.
//              They multiply operands: a lane's eight k are of one block, and the products are exact in FP16.
//   SCALES 4   powers of two, BLOCK_K 32: upper bytes of halves, in the order of SCALES 1, times a FP32 factor per row.
//              With several column tiles they multiply operands, exactly if the scales of a row are within 2^22
#pragma once
#include "common/half_pairs.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"

#ifndef EXPONENT_BITS
#define EXPONENT_BITS (W_BITS == 5 || W_BITS == 6 ? 3 : 0)  // of floats; 0: integers
#endif
#ifndef BLOCK_K
#define BLOCK_K 128  // k that share a scale, if GROUPED
#endif
#ifndef SCALES
#define SCALES 0  // of blocks: 0 FP16, 1 E8M0, 2 E4M3, 3 FP32, of 128 rows too, 4 powers of two as halves
#endif
#ifndef ZEROS
#define ZEROS 0  // 1: 4-bit codes with a zero point per row and block
#endif
static_assert(W_BITS == 4 || W_BITS == 5 || W_BITS == 6 || W_BITS == 8, "W_BITS must be 4, 5, 6 or 8");
static_assert(!ZEROS || (GROUPED && W_BITS == 4 && SCALES == 0), "ZEROS needs GROUPED, W_BITS 4 and SCALES 0");
static_assert((SCALES != 1 && SCALES != 4) || BLOCK_K == 32, "E8M0 scales have blocks of 32");
static_assert(SCALES != 2 || BLOCK_K == 16, "E4M3 scales have blocks of 16");
static_assert(SCALES != 3 || BLOCK_K == 128, "FP32 scales have blocks of 128");

constexpr bool IS_FLOAT = EXPONENT_BITS > 0;
constexpr int STEP_K = 128, MMA_ROWS = 16, MMA_TOKENS = 8, MMA_K = 16;
constexpr int MMAS = STEP_K / MMA_K;  // per step
constexpr int CODE_BYTES = MMA_ROWS * STEP_K * W_BITS / 8;
constexpr int CODE_VECTORS = CODE_BYTES / 512;  // of 16 bytes, per lane
constexpr bool IN_TILE = GROUPED && BLOCK_K < STEP_K;
constexpr bool OF_ROW_BLOCKS = SCALES == 3;
constexpr bool ON_OPERANDS = SCALES == 2 || (SCALES == 4 && COL_TILES > 1);  // scales multiply operands, not sums
constexpr int SUM_BLOCKS = GROUPED && !ON_OPERANDS ? STEP_K / BLOCK_K : 1;  // of a step, that are summed apart
constexpr int SCALE_WORDS = SCALES == 1 || SCALES == 2 || SCALES == 4 ? 2 : STEP_K / BLOCK_K * (1 + ZEROS);  // of a lane
constexpr int SCALE_BYTES = (SCALES == 2 ? 16 : 8) * SCALE_WORDS * 4;         // of a tile
constexpr int TILE_BYTES = CODE_BYTES + (IN_TILE ? SCALE_BYTES : 0);
constexpr int WHOLE_VECTORS = TILE_BYTES / 512;
constexpr int REST_BYTES = TILE_BYTES % 512;
static_assert(TILE_BYTES % 64 == 0, "TILE_BYTES must be a multiple of two sectors");

// Copy one tile to shared memory, by one warp; both addresses are of the lane's first 16 bytes.
__device__ inline void copy_lane(uint32_t to, const unsigned char* tile, int lane, uint64_t policy) {
#pragma unroll
  for (int v = 0; v < WHOLE_VECTORS; ++v) cp_async_16(to + v * 512, tile + v * 512, policy);
  if (REST_BYTES > 0 && lane < REST_BYTES / 16) cp_async_16(to + WHOLE_VECTORS * 512, tile + WHOLE_VECTORS * 512, policy);
}

__device__ inline void copy_tile(uint32_t to, const unsigned char* tile, int lane, uint64_t policy) {
  copy_lane(to + lane * 16, tile + lane * 16, lane, policy);
}

__device__ inline uint32_t rotated_right(uint32_t word, int bits) {
  return __funnelshift_r(word, word, bits);
}

#if !BIAS_SHIFT
// Ablation: the number itself as a half, from s00eeemm in its upper byte. The difference of the biases is
// added to the exponent; a subnormal, which has no implicit one, is converted from its mantissa.
__device__ inline uint32_t rebiased_half(uint32_t bits) {
  const uint32_t sign = bits & 0x8000u, magnitude = bits & 0x1FFFu;
  if (magnitude >= 0x0400u) return sign | (magnitude + (12u << 10));
  return sign | float_to_half(static_cast<float>(magnitude >> 8) * 0.0625f);
}

__device__ inline uint32_t rebiased_halves(uint32_t bits) {
  return rebiased_half(bits & 0xFFFFu) | rebiased_half(bits >> 16) << 16;
}
#endif

// Constants that convert nibbles u to codes: (1024 + u) - lower, (1024 + 16·u) / 16 + upper, each twice
// in a register. The lower nibbles are row l/4, the upper ones row l/4 + 8.
struct Offsets {
  uint32_t lower = 0x64086408u, upper = 0xD480D480u;  // u - 8

  // From the halves of zero points z: 1024 + z of the first row and -(64 + z) of the second.
  __device__ inline static Offsets of_rows(uint32_t halves) {
    return {__byte_perm(halves, 0u, 0x1010u), __byte_perm(halves, 0u, 0x3232u)};
  }
};

// The scales of a lane's two rows in a step.
struct BlockScales {
  uint32_t words[SCALE_WORDS];

  // From a tile in shared memory.
  __device__ inline void load(uint32_t tile, int lane) {
    const int at = SCALES == 2 ? lane / 2 : lane / 4;
    const uint32_t from = tile + CODE_BYTES + at * SCALE_WORDS * 4;
    if constexpr (SCALE_WORDS % 4 == 0) {
#pragma unroll
      for (int i = 0; i < SCALE_WORDS; i += 4) {
        const uint4 q = load_shared(from + 4 * i);
        words[i] = q.x, words[i + 1] = q.y, words[i + 2] = q.z, words[i + 3] = q.w;
      }
    } else if constexpr (SCALE_WORDS == 2) {
      const uint2 q = load_shared_words(from);
      words[0] = q.x, words[1] = q.y;
    }
  }

  // Scale of a block's sums in row lane/4 + 8 * row.
  __device__ inline float of_sums(int block, int row) const {
    if constexpr (SCALES == 1) {  // the byte is the exponent of a float
      const uint32_t shifted = block < 3 ? words[row] << (23 - 8 * block) : words[row] >> 1;
      return __uint_as_float(shifted & 0x7F800000u);
    }
    if constexpr (SCALES == 4) {  // times 2^-16
      const uint32_t shifted = block < 3 ? words[row] << (21 - 8 * block) : words[row] >> 3;
      return __uint_as_float((shifted & 0x0F800000u) | 0x30000000u);
    }
    if constexpr (OF_ROW_BLOCKS) return __uint_as_float(words[0]);
    return half_to_float(static_cast<half_bits>(words[block * (1 + ZEROS)] >> (16 * row)));
  }

  // Scale of a row's operands in 32 k as two halves. E4M3: times 2^7: the byte, moved to a half, is times 2^-8.
  __device__ inline uint32_t of_operands(int vector, int row) const {
    const uint32_t bytes = __byte_perm(words[row], 0u, 0x0404u | vector * 0x1010u);
    return SCALES == 4 ? bytes : multiply_half2(bytes >> 1, 0x78007800u);
  }
};

struct WeightTile {
  uint32_t words[CODE_BYTES / 128];  // floats of more than 4 bits: eight of the high plane, then the low one

  __device__ inline void load(uint32_t tile, int lane) {
#pragma unroll
    for (int v = 0; v < CODE_VECTORS; ++v) {
      const uint4 q = load_shared(tile + v * 512 + lane * 16);
      words[4 * v] = q.x, words[4 * v + 1] = q.y, words[4 * v + 2] = q.z, words[4 * v + 3] = q.w;
    }
    if constexpr (CODE_BYTES % 512 > 0) {
      static_assert(CODE_BYTES % 512 == 256 || CODE_BYTES % 512 == 0, "the rest must be 8 bytes per lane");
      const uint2 q = load_shared_words(tile + CODE_VECTORS * 512 + lane * 8);
      words[4 * CODE_VECTORS] = q.x, words[4 * CODE_VECTORS + 1] = q.y;
    }
  }

  // The words of the first or second 64 k; W_BITS 4 or 6.
  __device__ inline void load_half(uint32_t tile, int lane, int half) {
    const uint4 q = load_shared(tile + half * 512 + lane * 16);
    words[4 * half] = q.x, words[4 * half + 1] = q.y, words[4 * half + 2] = q.z, words[4 * half + 3] = q.w;
    if constexpr (W_BITS == 6) {
      const uint2 low = load_shared_words(tile + 1024 + lane * 16 + half * 8);
      words[8 + 2 * half] = low.x, words[9 + 2 * half] = low.y;
    }
  }

  // A operand registers of MMA i, a constant after unrolling; each has two weights as halves.
  __device__ inline void operands(uint32_t (&a)[4], int i, [[maybe_unused]] const Offsets& offsets) const {
    if constexpr (EXPONENT_BITS == 4) {
#pragma unroll
      for (int o = 0; o < 4; o += 2) {
        const uint32_t word = words[2 * i + o / 2];
        a[o] = word & 0xBF80BF80u;
        a[o + 1] = selected_bits<0x3F803F80u>(word << 7, word << 1) & 0xBF80BF80u;
      }
    } else if constexpr (W_BITS == 8) {
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const uint32_t selector = o % 2 == 0 ? 0x4140u : 0x4342u;
        // 1152 = 1024 + 128
        a[o] = subtract_half2(__byte_perm(words[2 * i + o / 2], 0x64646464u, selector), 0x64806480u);
      }
    } else if constexpr (EXPONENT_BITS == 2 && W_BITS == 4) {
      const uint32_t word = words[i];
      const uint32_t others = __brev(word);
      a[0] = word & 0x8E008E00u, a[1] = (word << 8) & 0x8E008E00u;
      a[2] = others & 0x8E008E00u, a[3] = (others << 8) & 0x8E008E00u;
    } else if constexpr (EXPONENT_BITS == 2) {
      const uint32_t u = words[i / 2 * 2], v = words[i / 2 * 2 + 1], w = words[8 + i / 2];
      const auto merged = [](uint32_t x, uint32_t y) { return (x ^ y) & 0x8F808F80u; };
      if (i % 2 == 0) {
        a[0] = merged(rotated_right(u, 23), rotated_right(w, 29));
        a[1] = merged(rotated_right(v, 19), rotated_right(u, 23));
        a[2] = merged(rotated_right(v, 11), rotated_right(w, 25));
        a[3] = merged(v, rotated_right(w, 25));
      } else {
        a[0] = merged(rotated_right(u, 4), rotated_right(w, 3));
        a[1] = merged(rotated_right(v, 19), rotated_right(u, 13));
        a[2] = merged(rotated_right(v, 9), u);
        a[3] = merged(w, 0u);
      }
    } else if constexpr (W_BITS == 4) {
#pragma unroll
      for (int o = 0; o < 4; o += 2) {
        const uint32_t word = o < 2 ? words[i] : words[i] >> 8;
        a[o] = subtract_half2(biased_halves<0x000F000Fu>(word), offsets.lower);
        a[o + 1] = multiply_add_half2(biased_halves<0x00F000F0u>(word), 0x2C002C00u, offsets.upper);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t bytes = quad(2 * i + h);
        a[h] = as_halves(bytes << 8), a[h + 2] = as_halves(bytes);
      }
    }
  }

 private:
  // Four floats as bytes s00eeemm; the bits of the zeros are undefined.
  __device__ inline uint32_t quad(int q) const {
    const uint32_t high = q % 2 == 0 ? words[q / 2] : rotated_right(words[q / 2], 4);
    const uint32_t low =
        W_BITS == 6 ? rotated_right(words[8 + q / 4], 2 * (q % 4)) : words[8 + q / 8] << q % 8;
    return selected_bits<0x1E1E1E1Eu>(high, low);
  }

  __device__ inline static uint32_t as_halves(uint32_t bytes) {
    const uint32_t halves = bytes & (W_BITS == 6 ? 0x9F009F00u : 0x9E009E00u);
#if !BIAS_SHIFT
    return rebiased_halves(halves);
#else
    return halves;
#endif
  }
};
