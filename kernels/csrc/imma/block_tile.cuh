// imma/block_tile.cuh: pipeline stages in shared memory, and epilogue, of the kernels for many tokens. A block tile is
// TILES * 16 rows of W and TOKENS tokens; a stage holds weights, codes and scales of one group of k.
// The K_SPLIT blocks of a cluster compute the same output tile and take the groups round-robin.
//
// The including source defines TILES, TOKENS, THREADS and K_SPLIT first.
#pragma once
#include "common/k_split.cuh"
#include "imma/layout.cuh"
#include "ptx/cp_async.cuh"

constexpr int ROWS = TILES * MMA_ROWS;
constexpr int SCALE_CHUNKS = SCALE_BYTES / 16;  // of a tile, 16 bytes each
constexpr int SWIZZLE_BYTES = 1024;        // 8 tokens; alignment of the codes
constexpr int TILES_AT = TOKENS * GROUP;   // in a stage, after the codes
constexpr int SCALES_AT = TILES_AT + TILES * TILE_BYTES;
constexpr int TOKEN_SCALES_AT = SCALES_AT + TILES * SCALE_BYTES;
constexpr int TOKEN_SCALES = A_GROUPED ? TOKENS : 0;  // of a stage; else a token has one scale
constexpr int STAGE_BYTES =
    (TOKEN_SCALES_AT + TOKEN_SCALES * 4 + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES * SWIZZLE_BYTES;
// Integer sums may start at the bits of the float BIAS, 1.5 * 2^23: the register, read as a float, is then BIAS + sum
// without a conversion. |sum| <= 128 * 128 * 128 < 2^22. BIAS times an FP16 scale is exact in FP32.
constexpr float BIAS = 12582912.0f;
constexpr int BIAS_BITS = 0x4B400000;
constexpr int OUT_STRIDE = ROWS + 4;  // floats; + 4: avoids bank conflicts between tokens
static_assert(THREADS % 64 == 0, "THREADS must be a multiple of 64: a thread's chunks have one swizzle");
static_assert(TILES * SCALE_CHUNKS <= (A_GROUPED ? 32 : THREADS) && TOKEN_SCALES / 4 <= THREADS - 32,
              "too few threads to copy the scales");

// Byte offset of a 16-byte chunk of a token's codes, swizzled so that a warp's reads have no bank conflicts.
__device__ inline int code_chunk(int token, int chunk) { return token * GROUP + (chunk ^ (token & 7)) * 16; }

// One thread's copies of every stage. The first warp copies scales of rows, the others those of tokens.
// Offsets are bytes; the launcher ensures that they fit 32 bits.
struct Copies {
  static constexpr int CHUNKS = TILE_BYTES / 16, WEIGHTS = (TILES * CHUNKS + THREADS - 1) / THREADS;
  static constexpr int TOKEN_STEP = THREADS / 8, CODES = (TOKENS + TOKEN_STEP - 1) / TOKEN_STEP;
  int groups;
  uint32_t weights[WEIGHTS], scales, codes, row_stride, token_scales, token_scales_stride;
  int tokens_left;   // tokens from this thread's first one on
  bool has_scales, has_token_scales, inside_scales;

  __device__ Copies(int m, int of_groups, int row_tiles, int first_tile, int first_token)
      : groups(of_groups) {
    const int t = threadIdx.x, steps = tiles_along(groups);
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      const int c = t + i * THREADS;
      const int tile = min(first_tile + c / CHUNKS, row_tiles - 1);  // past the end: never stored
      weights[i] = static_cast<uint32_t>(tile) * steps * TILE_BYTES + c % CHUNKS * 16;
    }
    has_scales = t < TILES * SCALE_CHUNKS;
    scales = static_cast<uint32_t>(min(first_tile + t / SCALE_CHUNKS, row_tiles - 1)) * steps * SCALE_BYTES +
             t % SCALE_CHUNKS * 16;
    row_stride = static_cast<uint32_t>(groups) * GROUP;
    codes = (first_token + t / 8) * row_stride + t % 8 * 16;
    tokens_left = m - first_token - t / 8;
    const int m_padded = (m + MMA_TOKENS - 1) / MMA_TOKENS * MMA_TOKENS, pair = (t - 32) * 4;
    has_token_scales = t >= 32 && pair < TOKEN_SCALES;
    inside_scales = first_token + pair < m_padded;
    token_scales = (inside_scales ? first_token + pair : 0) * 4;
    token_scales_stride = m_padded * 4;
  }

  __device__ void load_weights(uint32_t stage, const unsigned char* w, const unsigned char* sw,
                               int step) const {
    const unsigned char* from = w + static_cast<uint32_t>(step) * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i)
      if ((i + 1) * THREADS <= TILES * CHUNKS || threadIdx.x < TILES * CHUNKS - i * THREADS)
        cp_async_16(stage + TILES_AT + (threadIdx.x + i * THREADS) * 16, from + weights[i]);
    if (has_scales)
      cp_async_16(stage + SCALES_AT + threadIdx.x * 16,
                  sw + static_cast<uint32_t>(step) * SCALE_BYTES + scales);
  }

  __device__ void load_tokens(uint32_t stage, const int8_t* x, const float* sx, int step) const {
    const int group = group_of(step, groups);
    const int8_t* from = x + static_cast<uint32_t>(group) * GROUP + codes;
    const uint32_t to = stage + code_chunk(threadIdx.x / 8, threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < CODES; ++i)
      if ((i + 1) * TOKEN_STEP <= TOKENS || threadIdx.x / 8 < TOKENS - i * TOKEN_STEP)
        cp_async_16_or_zero(to + i * TOKEN_STEP * GROUP, from + i * TOKEN_STEP * row_stride,
                            i * TOKEN_STEP < tokens_left);
    if (has_token_scales)
      cp_async_16_or_zero(
          stage + TOKEN_SCALES_AT + (threadIdx.x - 32) * 16,
          reinterpret_cast<const char*>(sx) + static_cast<uint32_t>(group) * token_scales_stride +
              token_scales,
          inside_scales);
  }
};

// Epilogue. out: [TOKENS][OUT_STRIDE] in shared memory of every block of the cluster, partial sums as bits.
// Partial sums are reduced in a fixed order; a token's outputs are written contiguously.
__device__ inline void write_out(const float* out, const half_bits* bias, half_bits* y, int m, int n,
                                 int first_tile, int first_token, int rank, const float* sx,
                                 const FeatureScale* sn) {
  sync_k_split();
  const bool wide = n % 8 == 0 && reinterpret_cast<uint64_t>(y) % 16 == 0;
  for (int e = rank * THREADS + threadIdx.x; e < TOKENS * ROWS / 8; e += K_SPLIT * THREADS) {
    const int token = first_token + e / (ROWS / 8), row = e % (ROWS / 8) * 8;
    const int feature = first_tile * MMA_ROWS + row;
    if (token >= m || feature >= n) continue;
    Sum sums[8] = {};
#pragma unroll
    for (int block = 0; block < K_SPLIT; ++block) {
      const float4* at = reinterpret_cast<const float4*>(out + e / (ROWS / 8) * OUT_STRIDE + row);
      const float4 low = partial_sums_of(at, block), high = partial_sums_of(at + 1, block);
      sums[0] += sum_of(low.x), sums[1] += sum_of(low.y);
      sums[2] += sum_of(low.z), sums[3] += sum_of(low.w);
      sums[4] += sum_of(high.x), sums[5] += sum_of(high.y);
      sums[6] += sum_of(high.z), sums[7] += sum_of(high.w);
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int inside = min(feature + i, n - 1);  // past the end: never stored
      const float b = bias == nullptr ? 0.0f : half_to_float(bias[inside]);
      const uint32_t bits = float_to_half(scaled_output(sums[i], token, inside, sx, sn) + b);
      words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
    }
    half_bits* to = y + static_cast<long long>(token) * n + feature;
    if (wide) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (feature + i < n) to[i] = static_cast<half_bits>(words[i / 2] >> (i % 2 * 16));
    }
  }
  if constexpr (K_SPLIT > 1) sync_k_split();  // a block may exit once no other reads its shared memory
}
