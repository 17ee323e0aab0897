// kv_cache.cuh: one KV head's keys and values of a sequence in memory, as operands of tensor cores.
//   KV_BITS 16    halves
//   KV_BITS 8, 4  codes without sign and a half2 (step, least) a token and head, asymmetric,
//                 x = code * step + least, as Atom has it (arXiv 2310.19102, section 4.4)
// Codes become the halves 1024 + code or, of every other nibble, 1024 + 16 * code: one or two instructions for
// two. What multiplies them takes the 1024, the 16, step and least into account, once for many codes.
// The including source defines HEAD_DIM and KV_BITS first.
//
// A tile is 16 positions; lane l is g = l / 4, t = l % 4. Sums over values of a head may be taken in any
// order, and positions may be numbered in any, so that lanes load neighbouring bytes and what they have
// loaded is an operand of mma.m16n8k16:
//   keys    rows are positions. Lane l has those of rows g and g + 8, and of them every fourth chunk of
//           KEY_WIDTH neighbouring values; MMA s takes pairs 2s and 2s + 1 of a lane's values.
//   values  rows are values of the head. Lane l has positions 4t to 4t + 3, and of them every eighth chunk of
//           VALUE_WIDTH neighbouring values; MMA m takes its values 2m and 2m + 1.
// Row or column r of positions is the position `position_of(r)` of a tile: so lane l has the columns 2t,
// 2t + 1, 2t + 8 and 2t + 9 that an operand wants.
#pragma once
#include "decode.cuh"
#include "half_pairs.cuh"

constexpr int TILE_POSITIONS = 16, MMA_K = 16;
constexpr int CODE_BYTES = HEAD_DIM * KV_BITS / 8;                  // of a token and head
constexpr int PADDED = (HEAD_DIM + MMA_K - 1) / MMA_K * MMA_K;      // values of whole MMAs
constexpr int KEY_PAIRS = PADDED / 8, VALUE_SHARE = PADDED / 8;     // of a lane: of one position
static_assert(HEAD_DIM % 8 == 0, "a lane writes eight values");
static_assert(KV_BITS == 16 || KV_BITS == 8 || KV_BITS == 4, "halves or codes");

// Values of the widest load with which `lanes` lanes share out a position.
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

// A tile in shared memory: what each lane copies there lies as that lane reads it.
constexpr int KEY_SLOT = KEY_BYTES < 4 ? 4 : KEY_BYTES, VALUE_SLOT = VALUE_BYTES < 4 ? 4 : VALUE_BYTES;
constexpr int KEY_TILE_BYTES = 2 * KEY_CHUNKS * 32 * KEY_SLOT;
constexpr int VALUE_TILE_BYTES = 4 * VALUE_CHUNKS * 32 * VALUE_SLOT;
constexpr int SCALE_TILE_BYTES = KV_BITS == 16 ? 0 : 32 * 4;  // of keys, then of values
constexpr int TILE_BYTES = KEY_TILE_BYTES + VALUE_TILE_BYTES + SCALE_TILE_BYTES;

__device__ inline int position_of(int row) { return row % 8 / 2 * 4 + row / 8 * 2 + row % 2; }

template <int BYTES>
__device__ inline void copy_chunk(uint32_t to, const unsigned char* from, bool inside) {
  if (!inside) {
#pragma unroll
    for (int w = 0; w < (BYTES < 4 ? 4 : BYTES); w += 4) store_shared_word(to + w, 0);
  } else if constexpr (BYTES == 16) {
    cp_async_16(to, from);
  } else if constexpr (BYTES >= 4) {
    cp_async_few<BYTES>(to, from);
  } else if constexpr (BYTES == 2) {
    store_shared_word(to, load_written(reinterpret_cast<const uint16_t*>(from)));
  } else {
    store_shared_word(to, load_written(from));
  }
}

// What a warp copies of one KV head of a sequence.
struct Cached {
  const unsigned char *keys, *values;
  const uint32_t *key_scales, *value_scales;
  int last;  // position; those past it are copied as if they were it
};

// One warp starts to copy the tile of 16 positions from `base` on.
__device__ inline void copy_tile(uint32_t to, const Cached& cached, int base) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr bool WHOLE = PADDED == HEAD_DIM;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const unsigned char* row = cached.keys + min(base + position_of(g + 8 * r), cached.last) * CODE_BYTES;
#pragma unroll
    for (int c = 0; c < KEY_CHUNKS; ++c) {
      const int chunk = c * 4 + t;
      copy_chunk<KEY_BYTES>(to + ((r * KEY_CHUNKS + c) * 32 + lane) * KEY_SLOT, row + chunk * KEY_BYTES,
                            WHOLE || chunk * KEY_WIDTH < HEAD_DIM);
    }
  }
  to += KEY_TILE_BYTES;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned char* row = cached.values + min(base + 4 * t + i, cached.last) * CODE_BYTES;
#pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; ++c) {
      const int chunk = c * 8 + g;
      copy_chunk<VALUE_BYTES>(to + ((i * VALUE_CHUNKS + c) * 32 + lane) * VALUE_SLOT,
                              row + chunk * VALUE_BYTES, WHOLE || chunk * VALUE_WIDTH < HEAD_DIM);
    }
  }
  if constexpr (KV_BITS < 16) {
    const uint32_t* scales = lane < 16 ? cached.key_scales : cached.value_scales;
    cp_async_few<4>(to + VALUE_TILE_BYTES + lane * 4, scales + min(base + lane % 16, cached.last));
  }
}

template <int BYTES, int WORDS>
__device__ inline void read_chunk(uint32_t (&words)[WORDS], uint32_t from) {
  if constexpr (BYTES == 16) {
    const uint4 v = load_shared(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (BYTES == 8) {
    const uint2 v = load_shared_words(from);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = load_shared_word(from);
  }
}

// What this lane has of a tile: chunk c of its key row r, or of the values of its position i.
__device__ inline void read_keys(uint32_t (&words)[KEY_WORDS], uint32_t tile, int r, int c) {
  const int lane = threadIdx.x % 32;
  read_chunk<KEY_BYTES>(words, tile + ((r * KEY_CHUNKS + c) * 32 + lane) * KEY_SLOT);
}
__device__ inline void read_values(uint32_t (&words)[VALUE_WORDS], uint32_t tile, int i, int c) {
  const int lane = threadIdx.x % 32;
  read_chunk<VALUE_BYTES>(words, tile + KEY_TILE_BYTES + ((i * VALUE_CHUNKS + c) * 32 + lane) * VALUE_SLOT);
}
// Step and least of the keys at a position of a tile, and of the values of this lane's four.
__device__ inline uint32_t read_key_scale(uint32_t tile, int at) {
  return load_shared_word(tile + KEY_TILE_BYTES + VALUE_TILE_BYTES + at * 4);
}
__device__ inline uint4 read_value_scales(uint32_t tile) {
  return load_shared(tile + KEY_TILE_BYTES + VALUE_TILE_BYTES + 64 + threadIdx.x % 4 * 16);
}

constexpr float BIAS = 1024.0f;
constexpr uint32_t BIAS_PAIR = 0x64006400u;

// How many times itself code i of a chunk is among halves.
__host__ __device__ constexpr float enlarged(int i) { return KV_BITS == 4 && i % 2 != 0 ? 16.0f : 1.0f; }

// Bytes 0 and 1, or 2 and 3, as halves. With SELECTOR 0x4140 or 0x4342.
template <uint32_t SELECTOR>
__device__ inline uint32_t widened_bytes(uint32_t word) {
  return __byte_perm(word, BIAS_PAIR | BIAS_PAIR >> 8, SELECTOR);
}

// A chunk of keys as halves, two values of a position a word; which two, key_place says.
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

// Where value i of a head is among the halves of [4 t][ROW pairs] that keys are multiplied by.
template <int ROW>
__device__ inline unsigned key_place(unsigned i) {
  const unsigned chunk = i / KEY_WIDTH, within = i % KEY_WIDTH;
  unsigned pair = within / 2, upper = within % 2;
  if constexpr (KV_BITS == 4) {
    constexpr unsigned APART = KEY_WIDTH == 4 ? 2 : 4;  // values of a pair
    pair = within / (2 * APART) * APART + within % APART;
    upper = within / APART % 2;
  }
  return (chunk % 4 * ROW + chunk / 4 * (KEY_WIDTH / 2) + pair) * 2 + upper;
}

// A chunk of the values of two positions as halves, both positions' of one value a word.
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
