// decode/kv_cache.cuh: one KV head's keys and values of a sequence in memory, as operands of tensor cores.
//   KV_BITS 16    halves
//   KV_BITS 8, 4  unsigned codes and a half2 (step, minimum) per token and head: asymmetric quantization,
//                 x = code * step + minimum, as in Atom (arXiv 2310.19102, section 4.4)
// Codes are converted to the halves 1024 + code or, for every other nibble, 1024 + 16 * code: one or two
// instructions for two codes. The callers correct for the 1024, the 16, step and minimum, once for many codes.
// The including source defines HEAD_DIM and KV_BITS first.
//
// A tile is 16 positions. g = l / 4 and t = l % 4 of lane l. The values of a head, and the positions, are permuted,
// which does not change sums: lanes load adjacent bytes, and the loaded registers are operands of mma.m16n8k16:
//   keys    rows are positions. Lane l has rows g and g + 8, and of each every fourth chunk of KEY_WIDTH adjacent
//           values; MMA s takes pairs 2s and 2s + 1 of a lane's values.
//   values  rows are values of the head. Lane l has positions 4t to 4t + 3, and of each every eighth chunk of
//           VALUE_WIDTH adjacent values; MMA m takes its values 2m and 2m + 1.
// Row or column r of the MMA is position_of(r) of the tile, so that the positions of lane l are its columns 2t,
// 2t + 1, 2t + 8 and 2t + 9.
#pragma once
#include "common/half_pairs.cuh"
#include "decode/math.cuh"
#include "ptx/memory.cuh"

constexpr int TILE_POSITIONS = 16, MMA_K = 16;
constexpr int CODE_BYTES = HEAD_DIM * KV_BITS / 8;                  // of a token and head
constexpr int PADDED = (HEAD_DIM + MMA_K - 1) / MMA_K * MMA_K;      // HEAD_DIM rounded up to whole MMAs
constexpr int KEY_PAIRS = PADDED / 8, VALUE_SHARE = PADDED / 8;     // per lane and position
static_assert(HEAD_DIM % 8 == 0, "HEAD_DIM must be a multiple of 8: a lane writes eight values");
static_assert(KV_BITS == 16 || KV_BITS == 8 || KV_BITS == 4, "KV_BITS must be 16, 8 or 4");

// Values per load of the widest loads by which `lanes` lanes can read a position.
__host__ __device__ constexpr int width_of(int lanes) {
  int width = 128 / KV_BITS;
  while (PADDED % (width * lanes) != 0 || HEAD_DIM % width != 0) width /= 2;
  return width;
}
__host__ __device__ constexpr int at_least_one(int n) { return n < 1 ? 1 : n; }
constexpr int KEY_WIDTH = width_of(4), VALUE_WIDTH = width_of(8);
constexpr int KEY_BYTES = KEY_WIDTH * KV_BITS / 8, VALUE_BYTES = VALUE_WIDTH * KV_BITS / 8;
constexpr int KEY_WORDS = at_least_one(KEY_BYTES / 4), VALUE_WORDS = at_least_one(VALUE_BYTES / 4);
constexpr int KEY_CHUNKS = PADDED / KEY_WIDTH / 4, VALUE_CHUNKS = PADDED / VALUE_WIDTH / 8;

struct KeyTile {
  uint32_t words[2][KEY_CHUNKS][KEY_WORDS];
};
struct ValueTile {
  uint32_t words[4][VALUE_CHUNKS][VALUE_WORDS];
};

__device__ inline int position_of(int row) { return row % 8 / 2 * 4 + row / 8 * 2 + row % 2; }

template <int BYTES, int WORDS>
__device__ inline void load_chunk(uint32_t (&words)[WORDS], const unsigned char* at) {
  if constexpr (BYTES == 16) {
    const uint4 v = load_written(reinterpret_cast<const uint4*>(at));
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (BYTES == 8) {
    const uint2 v = load_written(reinterpret_cast<const uint2*>(at));
    words[0] = v.x, words[1] = v.y;
  } else if constexpr (BYTES == 4) {
    words[0] = load_written(reinterpret_cast<const uint32_t*>(at));
  } else if constexpr (BYTES == 2) {
    words[0] = load_written(reinterpret_cast<const uint16_t*>(at));
  } else {
    words[0] = load_written(at);
  }
}

// Positions past `last` are clamped to it.
__device__ inline void load_keys(KeyTile& tile, const unsigned char* codes, int base, int last) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const unsigned char* row = codes + min(base + position_of(g + 8 * r), last) * CODE_BYTES;
#pragma unroll
    for (int c = 0; c < KEY_CHUNKS; ++c) {
      const int chunk = c * 4 + t;
      if (PADDED == HEAD_DIM || chunk * KEY_WIDTH < HEAD_DIM) {
        load_chunk<KEY_BYTES>(tile.words[r][c], row + chunk * KEY_BYTES);
      } else {
#pragma unroll
        for (int w = 0; w < KEY_WORDS; ++w) tile.words[r][c][w] = 0;
      }
    }
  }
}

__device__ inline void load_values(ValueTile& tile, const unsigned char* codes, int base, int last) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned char* row = codes + min(base + 4 * t + i, last) * CODE_BYTES;
#pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; ++c) {
      const int chunk = c * 8 + g;
      if (PADDED == HEAD_DIM || chunk * VALUE_WIDTH < HEAD_DIM) {
        load_chunk<VALUE_BYTES>(tile.words[i][c], row + chunk * VALUE_BYTES);
      } else {
#pragma unroll
        for (int w = 0; w < VALUE_WORDS; ++w) tile.words[i][c][w] = 0;
      }
    }
  }
}

// Step and minimum of a tile: those of the keys of position l in lane l < 16, those of the values in lane l + 16.
__device__ inline uint32_t load_scales(const uint32_t* keys, const uint32_t* values, int base, int last) {
  const int lane = threadIdx.x % 32, at = min(base + lane % 16, last);
  return load_written((lane < 16 ? keys : values) + at);
}

constexpr float BIAS = 1024.0f;
constexpr uint32_t BIAS_PAIR = 0x64006400u;

// Factor by which code i of a chunk is multiplied when it is converted to a half.
__host__ __device__ constexpr float code_factor(int i) { return KV_BITS == 4 && i % 2 != 0 ? 16.0f : 1.0f; }

// Biased halves of bytes 0 and 1 (SELECTOR 0x4140), or 2 and 3 (0x4342).
template <uint32_t SELECTOR>
__device__ inline uint32_t widened_bytes(uint32_t word) {
  return __byte_perm(word, BIAS_PAIR | BIAS_PAIR >> 8, SELECTOR);
}

// A chunk of keys as halves: two values of one position per word, paired as in key_index.
__device__ inline void key_pairs(uint32_t (&pairs)[KEY_WIDTH / 2], const uint32_t (&words)[KEY_WORDS]) {
#pragma unroll
  for (int w = 0; w < KEY_WORDS; ++w) {
    if constexpr (KV_BITS == 16) {
      pairs[w] = words[w];
    } else if constexpr (KV_BITS == 8) {
      pairs[2 * w] = widened_bytes<0x4140>(words[w]);
      pairs[2 * w + 1] = widened_bytes<0x4342>(words[w]);
    } else if constexpr (KEY_WIDTH == 4) {
      const uint32_t both = words[w] | words[w] << 8;
      pairs[0] = biased_halves<0x000F000F>(both);
      pairs[1] = biased_halves<0x00F000F0>(both);
    } else {
      pairs[4 * w] = biased_halves<0x000F000F>(words[w]);
      pairs[4 * w + 1] = biased_halves<0x00F000F0>(words[w]);
      pairs[4 * w + 2] = biased_halves<0x000F000F>(words[w] >> 8);
      pairs[4 * w + 3] = biased_halves<0x00F000F0>(words[w] >> 8);
    }
  }
}

// Index of value i of a head in the query operand, half [4 t][ROW pairs][2].
template <int ROW>
__device__ inline unsigned key_index(unsigned i) {
  const unsigned chunk = i / KEY_WIDTH, within = i % KEY_WIDTH;
  unsigned pair = within / 2, upper = within % 2;
  if constexpr (KV_BITS == 4) {
    constexpr unsigned APART = KEY_WIDTH == 4 ? 2 : 4;  // distance of the two values of a pair
    pair = within / (2 * APART) * APART + within % APART;
    upper = within / APART % 2;
  }
  return (chunk % 4 * ROW + chunk / 4 * (KEY_WIDTH / 2) + pair) * 2 + upper;
}

// A chunk of the values of two positions as halves: one value of both positions per word.
__device__ inline void value_pairs(uint32_t (&pairs)[VALUE_WIDTH], const uint32_t (&first)[VALUE_WORDS],
                                   const uint32_t (&second)[VALUE_WORDS]) {
#pragma unroll
  for (int w = 0; w < VALUE_WORDS; ++w) {
    const uint32_t a = first[w], b = second[w];
    if constexpr (KV_BITS == 16) {
      pairs[2 * w] = __byte_perm(a, b, 0x5410);
      pairs[2 * w + 1] = __byte_perm(a, b, 0x7632);
    } else if constexpr (KV_BITS == 8) {
#pragma unroll
      for (int h = 0; h < 2 && h * 2 < VALUE_WIDTH; ++h) {
        const uint32_t bytes = __byte_perm(a, b, h == 0 ? 0x5140 : 0x7362);
        pairs[4 * w + 2 * h] = widened_bytes<0x4140>(bytes);
        pairs[4 * w + 2 * h + 1] = widened_bytes<0x4342>(bytes);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 4 && h * 2 < VALUE_WIDTH; ++h) {
        const uint32_t nibbles = __byte_perm(a, b, h < 2 ? 0x5410 : 0x7632) >> (h % 2 * 8);
        pairs[8 * w + 2 * h] = biased_halves<0x000F000F>(nibbles);
        pairs[8 * w + 2 * h + 1] = biased_halves<0x00F000F0>(nibbles);
      }
    }
  }
}
