// decode/attention_tile.cuh: one warp, a tile of 16 positions of the KV cache, and up to eight query heads.
//
// Keys are multiplied by the heads' queries, which are the columns of an MMA, and values by the softmax weights of
// their positions. With up to 4 heads, columns n and n + 4 belong to the same head, whose weights are split
// into two FP16 numbers with 22 bits in total. For 8 and 4 bits, tensor cores multiply the biased codes of
// kv_cache.cuh, 1024 + code; 1024 times the sum of the other operand is then subtracted. The minimums are
// multiplied by the same sums. FP32 has 13 bits more than 1024, far finer than half a step of a code.
// The including source defines GROUP_HEADS, HEAD_DIM, KV_BITS and TILES first.
#pragma once
#include "decode/kv_cache.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

constexpr int COLUMNS = 8, ROW = KEY_PAIRS + 2;  // query pairs; + 2: avoids bank conflicts
constexpr bool TWO_HALVES = GROUP_HEADS <= 4;
constexpr int MMAS = PADDED / MMA_K;
constexpr uint32_t EVERY = 0xffffffffu;
static_assert(GROUP_HEADS <= COLUMNS, "GROUP_HEADS must be at most 8, the columns of an MMA");

// The TILES tiles of a warp's iteration, in registers.
struct Step {
  KeyTile keys[TILES];
  ValueTile values[TILES];
  uint32_t scales[TILES];  // load_scales
};

// Of the queries of columns 2t and 2t + 1, if the cache has codes: their sums, and the contribution of the bias of
// codes to a score.
struct QuerySums {
  float plain[2], bias[2];
};

// Online softmax of one warp. acc: accumulator fragments of values. The others belong to head column l / 4: `largest`
// is equal in its four lanes, each lane sums `total`, `minimum` and `operands` over its own positions.
struct SoftmaxState {
  float acc[MMAS][4];
  float largest, total, minimum;
  float operands;  // sum of the factors of codes
};

// The head of an MMA's column.
__device__ inline int head_of(int column) { return min(TWO_HALVES ? column % 4 : column, GROUP_HEADS - 1); }

__device__ inline float step_of(uint32_t scale) { return half_to_float(static_cast<half_bits>(scale)); }
__device__ inline float minimum_of(uint32_t scale) {
  return half_to_float(static_cast<half_bits>(scale >> 16));
}

// query: shared memory address of this lane's operands.
__device__ inline QuerySums sum_queries(uint32_t query) {
  constexpr uint32_t ONES = 0x3C003C00u, CODE_FACTORS = KV_BITS == 4 ? 0x4C004C00u : ONES;  // 16
  float c[2][4] = {};  // two accumulators, so that consecutive MMAs are independent
#pragma unroll
  for (int mma = 0; mma < MMAS; ++mma) {
    const uint2 q = load_shared_words(query + mma * 8);
    mma_f16_m16n8k16(c[mma % 2], {ONES, BIAS_PAIR, CODE_FACTORS, BIAS_PAIR}, {q.x, q.y});
  }
  return {{c[0][0] + c[1][0], c[0][1] + c[1][1]}, {c[0][2] + c[1][2], c[0][3] + c[1][3]}};
}

// Scores of a tile in base 2, of column l / 4 and positions 4t to 4t + 3.
__device__ inline void score_tile(float (&score)[4], const KeyTile& keys, uint32_t scales, uint32_t query,
                                  const QuerySums& sums, float scale) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float c[2][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < KEY_CHUNKS; ++chunk) {
    uint32_t pairs[2][KEY_WIDTH / 2];
    key_pairs(pairs[0], keys.words[0][chunk]);
    key_pairs(pairs[1], keys.words[1][chunk]);
#pragma unroll
    for (int s = 0; s < KEY_WIDTH / 4; ++s) {
      const int mma = chunk * (KEY_WIDTH / 4) + s;
      const uint2 q = load_shared_words(query + mma * 8);
      mma_f16_m16n8k16(c[mma % 2], {pairs[0][2 * s], pairs[1][2 * s], pairs[0][2 * s + 1], pairs[1][2 * s + 1]},
                       {q.x, q.y});
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t row_scales = KV_BITS == 16 ? 0 : __shfl_sync(EVERY, scales, position_of(g + 8 * r));
    const float step = KV_BITS == 16 ? scale : step_of(row_scales) * scale, minimum = minimum_of(row_scales) * scale;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& sum = c[0][2 * r + j];
      sum += c[1][2 * r + j];
      sum = KV_BITS == 16 ? sum * step : (sum - sums.bias[j]) * step + minimum * sums.plain[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int from = (2 * t + i % 2) * 4 + g / 2;
    score[i] = __shfl_sync(EVERY, c[0][i / 2 * 2], from);
    if constexpr (GROUP_HEADS > 1) {
      const float odd = __shfl_sync(EVERY, c[0][i / 2 * 2 + 1], from);
      if (g % 2 != 0) score[i] = odd;
    }
  }
}

// Rescale the running sums if the largest score increases. largest: of this lane's new scores.
__device__ inline void rescale(SoftmaxState& state, float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(EVERY, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(EVERY, largest, 2));
  largest = fmaxf(largest, state.largest);
  const bool changes = largest != state.largest && state.largest != -infinite();
  const float factor = changes ? power_of_two(state.largest - largest) : 1.0f;
  state.largest = largest;
  if (!__any_sync(EVERY, changes)) return;
  state.total *= factor;
  state.minimum *= factor;
  state.operands *= factor;
  const int t = threadIdx.x % 4;
  const float even = __shfl_sync(EVERY, factor, 8 * t), odd = __shfl_sync(EVERY, factor, 8 * t + 4);
#pragma unroll
  for (int m = 0; m < MMAS; ++m) {
    state.acc[m][0] *= even, state.acc[m][2] *= even;
    state.acc[m][1] *= odd, state.acc[m][3] *= odd;
  }
}

// Convert the softmax weights of a tile to the MMA operand of its values, and add them to the running sums.
__device__ inline void make_weight_operand(uint32_t (&operand)[2], SoftmaxState& state, const float (&weight)[4],
                                   uint32_t scales) {
  uint32_t halves[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float scaled = weight[i];
    state.total += scaled;
    if constexpr (KV_BITS < 16) {
      const uint32_t value_scales = __shfl_sync(EVERY, scales, 16 + threadIdx.x % 4 * 4 + i);
      state.minimum += scaled * minimum_of(value_scales);
      scaled *= step_of(value_scales);
    }
    const half_bits upper = float_to_half(scaled);
    const bool is_rest = TWO_HALVES && threadIdx.x % 32 >= 16;
    halves[i] = is_rest ? float_to_half(scaled - half_to_float(upper)) : upper;
    if constexpr (KV_BITS < 16) state.operands += half_to_float(static_cast<half_bits>(halves[i]));
  }
  operand[0] = halves[0] | halves[1] << 16;
  operand[1] = halves[2] | halves[3] << 16;
}

__device__ inline void add_tile(SoftmaxState& state, const ValueTile& values, const uint32_t (&operand)[2]) {
#pragma unroll
  for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk) {
    uint32_t lower[VALUE_WIDTH], upper[VALUE_WIDTH];
    value_pairs(lower, values.words[0][chunk], values.words[1][chunk]);
    value_pairs(upper, values.words[2][chunk], values.words[3][chunk]);
#pragma unroll
    for (int m = 0; m < VALUE_WIDTH / 2; ++m)
      mma_f16_m16n8k16(state.acc[chunk * (VALUE_WIDTH / 2) + m],
                       {lower[2 * m], lower[2 * m + 1], upper[2 * m], upper[2 * m + 1]}, operand);
  }
}

// Store a warp's sums of values, float [GROUP_HEADS][HEAD_DIM], without those of minimums, to shared memory.
// The other sums are reduced to the same values in all lanes of a column.
__device__ inline void store_sums(float* to, SoftmaxState& state) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    state.total += __shfl_xor_sync(EVERY, state.total, offset);
    if constexpr (KV_BITS < 16) {
      state.minimum += __shfl_xor_sync(EVERY, state.minimum, offset);
      state.operands += __shfl_xor_sync(EVERY, state.operands, offset);
    }
  }
#pragma unroll
  for (int j = 0; j < 2 && j < GROUP_HEADS; ++j) {
    const float bias = KV_BITS == 16 ? 0.0f : BIAS * __shfl_sync(EVERY, state.operands, 8 * t + 4 * j);
    const int head = 2 * t + j;
    float sum[VALUE_SHARE];
#pragma unroll
    for (int e = 0; e < VALUE_SHARE; ++e) {
      sum[e] = state.acc[e / 2][e % 2 * 2 + j];
      if constexpr (KV_BITS < 16) sum[e] = (sum[e] - bias) * (1.0f / code_factor(e));
      if constexpr (TWO_HALVES) sum[e] += __shfl_xor_sync(EVERY, sum[e], 2);
    }
    if (head >= GROUP_HEADS) continue;
    constexpr int STORE_WIDTH = VALUE_WIDTH % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int e = 0; e < VALUE_SHARE; e += STORE_WIDTH) {
      const int i = (e / VALUE_WIDTH * 8 + g) * VALUE_WIDTH + e % VALUE_WIDTH;
      if (PADDED != HEAD_DIM && i >= HEAD_DIM) continue;
      float* at = to + head * HEAD_DIM + i;
      if constexpr (STORE_WIDTH == 4)
        *reinterpret_cast<float4*>(at) = make_float4(sum[e], sum[e + 1], sum[e + 2], sum[e + 3]);
      else
        *reinterpret_cast<float2*>(at) = make_float2(sum[e], sum[e + 1]);
    }
  }
}
